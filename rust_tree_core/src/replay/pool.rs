//! Page ids of one tier.

/// Hands out page ids; what comes back last goes out first.
#[derive(Debug)]
pub(super) struct Pool {
    size: usize,
    /// Pages from here on were never handed out: a pool that is larger than its trace costs nothing.
    fresh: usize,
    free: Vec<u32>,
}

impl Pool {
    /// A pool of `size` pages, which must fit in `u32`.
    pub fn new(size: usize) -> Self {
        debug_assert!(u32::try_from(size).is_ok());
        Self { size, fresh: 0, free: Vec::new() }
    }

    pub fn size(&self) -> usize {
        self.size
    }

    /// Pages that can be taken.
    pub fn room(&self) -> usize {
        self.size - self.used()
    }

    /// Pages that are out.
    pub fn used(&self) -> usize {
        self.fresh - self.free.len()
    }

    /// Appends `count` pages, which must be there.
    pub fn take(&mut self, count: usize, to: &mut Vec<u32>) {
        assert!(count <= self.room(), "{count} pages are taken, {} are free", self.room());
        let used_before = count.min(self.free.len());
        to.extend(self.free.drain(self.free.len() - used_before..));
        let fresh = count - used_before;
        to.extend((self.fresh..self.fresh + fresh).map(|page| page as u32));
        self.fresh += fresh;
    }

    /// Takes pages back.
    pub fn give(&mut self, pages: &[u32]) {
        self.free.extend_from_slice(pages);
        debug_assert!(self.free.len() <= self.fresh, "more pages came back than were out");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn free_and_used_make_the_whole_pool_and_no_page_is_out_twice() {
        let mut pool = Pool::new(5);
        let mut out = Vec::new();
        pool.take(3, &mut out);
        assert_eq!((pool.used(), pool.room()), (3, 2));
        pool.give(&out.split_off(1));
        pool.take(4, &mut out);
        assert_eq!((pool.used(), pool.room()), (5, 0));
        out.sort_unstable();
        assert_eq!(out, [0, 1, 2, 3, 4]);
    }

    #[test]
    #[should_panic(expected = "2 pages are taken, 1 are free")]
    fn what_is_not_there_is_not_handed_out() {
        let mut pool = Pool::new(1);
        pool.take(2, &mut Vec::new());
    }
}
