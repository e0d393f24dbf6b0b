//! Copies against an obvious model, byte by byte; and what is refused.

use super::*;
use crate::Geometry;

/// A small generator of numbers (xorshift).
struct Random(u64);

impl Random {
    fn below(&mut self, count: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % count as u64) as usize
    }

    /// `count` different numbers below `limit`, in any order.
    fn distinct(&mut self, count: usize, limit: usize) -> Vec<u32> {
        let mut all: Vec<u32> = (0..limit as u32).collect();
        for at in 0..count {
            let other = at + self.below(limit - at);
            all.swap(at, other);
        }
        all.truncate(count);
        all
    }
}

/// A pool in memory of its own: any order of its dimensions, any gaps between them, any alignment.
struct Pool {
    geometry: Geometry,
    starts: Vec<usize>,
    bytes: Vec<u8>,
}

impl Pool {
    /// `counts`: planes, pages, tokens, heads; run bytes.
    fn new(random: &mut Random, counts: [usize; 4], run_bytes: usize) -> Self {
        let mut order = [0, 1, 2, 3];
        for at in 0..4 {
            let other = at + random.below(4 - at);
            order.swap(at, other);
        }
        if random.below(2) == 0 {
            order = [[3, 2, 1, 0], [3, 0, 2, 1], [3, 2, 0, 1], [0, 2, 3, 1]][random.below(4)]; // the four layouts
        }
        let gap = |random: &mut Random| if random.below(3) == 0 { random.below(40) } else { 0 };
        let (mut strides, mut extent) = ([0; 4], run_bytes);
        for dim in order {
            strides[dim] = extent + gap(random);
            extent = strides[dim] * counts[dim];
        }
        let first = if random.below(2) == 0 { random.below(64) } else { 0 };
        let geometry = Geometry {
            pages: counts[1],
            tokens: counts[2],
            heads: counts[3],
            run_bytes,
            page_stride: strides[1],
            token_stride: strides[2],
            head_stride: strides[3],
        };
        let starts = (0..counts[0]).map(|plane| first + plane * strides[0]).collect();
        let bytes = (0..first + extent).map(|_| random.below(256) as u8).collect();
        Self { geometry, starts, bytes }
    }

    fn planes(&mut self) -> Planes {
        let base = self.bytes.as_mut_ptr();
        let starts = self.starts.iter().map(|&start| base.wrapping_add(start)).collect();
        // SAFETY: the pool was made as large as its dimensions need, and outlives what the tests do with this.
        unsafe { Planes::new(self.geometry, starts) }.unwrap()
    }

    fn run(&self, plane: usize, page: u32, token: usize, head: usize) -> Range<usize> {
        let geometry = &self.geometry;
        let start = self.starts[plane]
            + page as usize * geometry.page_stride
            + token * geometry.token_stride
            + head * geometry.head_stride;
        start..start + geometry.run_bytes
    }
}

/// What a copy leaves in the target, whatever it does in between.
fn copied(
    target: &Pool,
    target_pages: &[u32],
    source: &Pool,
    source_pages: &[u32],
    planes: Range<usize>,
) -> Vec<u8> {
    let mut expected = target.bytes.clone();
    for (&to, &from) in target_pages.iter().zip(source_pages) {
        for plane in planes.clone() {
            for token in 0..target.geometry.tokens {
                for head in 0..target.geometry.heads {
                    let run = &source.bytes[source.run(plane, from, token, head)];
                    expected[target.run(plane, to, token, head)].copy_from_slice(run);
                }
            }
        }
    }
    expected
}

#[test]
fn any_copy_leaves_what_the_model_leaves() {
    let rounds = if cfg!(miri) { 30 } else { 2000 };
    let mut random = Random(0x2545_F491_4F6C_DD1D);
    let (mut gathered, mut threaded) = (0, 0);
    for round in 0..rounds {
        let [planes, tokens, heads] = [1 + random.below(4), 1 + random.below(9), 1 + random.below(5)];
        let run_bytes = [1, 2, 3, 16, 64, 100, 256, 1000, 3000][random.below(if cfg!(miri) { 6 } else { 9 })];
        let pages = [1 + random.below(6), 1 + random.below(6)];
        let mut target = Pool::new(&mut random, [planes, pages[0], tokens, heads], run_bytes);
        let mut source = Pool::new(&mut random, [planes, pages[1], tokens, heads], run_bytes);
        let count = random.below(pages[0].min(pages[1]) + 1);
        let target_pages = random.distinct(count, pages[0]);
        let source_pages: Vec<u32> = (0..count).map(|_| random.below(pages[1]) as u32).collect();
        let first = random.below(planes);
        let range = first..first + random.below(planes - first + 1);
        let expected = copied(&target, &target_pages, &source, &source_pages, range.clone());
        let before = source.bytes.clone();

        let (to, from) = (target.planes(), source.planes());
        let copy = PageCopy::new(&to, &target_pages, &from, &source_pages, range.clone()).unwrap();
        let (threads, streaming) = (1 + random.below(3), random.below(4) > 0);
        threaded += usize::from(threads > 1 && copy.units() > 1);
        gathered += usize::from(
            format!("{:?}", Route::new(to.geometry(), from.geometry(), streaming)).contains("Some"),
        );
        let (step, mut arrived) = (random.below(4), Vec::new());
        let report = |step: usize| {
            arrived.push(step);
            ControlFlow::<()>::Continue(())
        };
        // SAFETY: nobody else has these pools.
        assert!(unsafe { copy.run_with(threads, step, report, streaming, 1) }.is_continue());
        let steps = if step == 0 { usize::from(!range.is_empty()) } else { range.len().div_ceil(step) };
        assert!(arrived.into_iter().eq(0..steps));
        assert!(target.bytes == expected, "round {round}: {target_pages:?} from {source_pages:?}");
        assert!(source.bytes == before, "round {round}");
    }
    assert!(gathered > rounds / 20 && threaded > rounds / 10, "{gathered} gathered, {threaded} threaded");
}

#[test]
fn copies_that_are_large_enough_take_every_way_there_is() {
    if cfg!(miri) {
        return; // the same code as above, only more of it
    }
    let mut random = Random(7);
    for threads in [1, 2, 5] {
        let mut target = Pool::new(&mut random, [4, 9, 64, 4], 256);
        let mut source = Pool::new(&mut random, [4, 9, 64, 4], 256);
        let (to_pages, from_pages) = (random.distinct(9, 9), random.distinct(9, 9));
        let expected = copied(&target, &to_pages, &source, &from_pages, 0..4);
        let (to, from) = (target.planes(), source.planes());
        let copy = PageCopy::new(&to, &to_pages, &from, &from_pages, 0..4).unwrap();
        assert!(copy.bytes() >= 2 * THREAD_BYTES && copy.bytes() >= STREAMING_FROM);
        // SAFETY: nobody else has these pools.
        assert!(unsafe { copy.run(threads, 0, |_| ControlFlow::<()>::Continue(())) }.is_continue());
        assert!(target.bytes == expected);
    }
}

#[test]
fn a_step_is_there_when_it_is_said_to_be_and_the_rest_can_be_left() {
    let mut random = Random(11);
    for threads in [1, 3] {
        for last in [0, 2, 3] {
            let mut target = Pool::new(&mut random, [4, 9, 8, 2], 256);
            let mut source = Pool::new(&mut random, [4, 9, 8, 2], 256);
            let pages = random.distinct(9, 9);
            let expected = copied(&target, &pages, &source, &pages, 0..4);
            let (to, from) = (target.planes(), source.planes());
            let copy = PageCopy::new(&to, &pages, &from, &pages, 0..4).unwrap();
            let mut steps = 0;
            let report = |step: usize| {
                assert_eq!(step, steps);
                steps += 1;
                for &page in &pages {
                    let start = to.start(step).wrapping_add(page as usize * to.geometry().page_stride);
                    // SAFETY: the first run of a page of a plane that has arrived, so that nobody writes it.
                    let run = unsafe { std::slice::from_raw_parts(start, 256) };
                    let at = target.starts[step] + page as usize * to.geometry().page_stride;
                    assert!(run == &expected[at..at + 256], "step {step}, page {page}");
                }
                if step == last { ControlFlow::Break(step) } else { ControlFlow::Continue(()) }
            };
            // SAFETY: nobody else has these pools.
            let ended = unsafe { copy.run_with(threads, 1, report, true, 1) };
            assert_eq!(ended, ControlFlow::Break(last));
            assert_eq!(steps, last + 1);
        }
    }
}

#[test]
fn one_thread_begins_nothing_after_it_was_broken_off() {
    let (mut one, mut two) = (plain(), plain());
    two.bytes.fill(7);
    let (target, source) = (one.planes(), two.planes());
    let copy = PageCopy::new(&target, &[0, 1], &source, &[2, 3], 0..2).unwrap();
    // SAFETY: nobody else has these pools.
    assert!(unsafe { copy.run(1, 1, |_| ControlFlow::Break(())) }.is_break());
    assert!(one.bytes[..64].iter().all(|&byte| byte == 7));
    assert!(one.bytes[64..].iter().all(|&byte| byte == 0));
}

/// A pool of 2 planes, 4 pages, 2 tokens, 2 heads, 8 bytes a run.
fn plain() -> Pool {
    let geometry = Geometry {
        pages: 4,
        tokens: 2,
        heads: 2,
        run_bytes: 8,
        page_stride: 32,
        token_stride: 16,
        head_stride: 8,
    };
    Pool { geometry, starts: vec![0, 128], bytes: vec![0; 256] }
}

#[test]
fn what_does_not_fit_is_refused() {
    let (mut one, mut two) = (plain(), plain());
    let (target, source) = (one.planes(), two.planes());
    let refused = |to: &[u32], from: &[u32], planes: Range<usize>| {
        let copy = PageCopy::new(&target, to, &source, from, planes);
        copy.err().expect("this must be refused").to_string()
    };
    assert!(refused(&[0, 1], &[0], 0..2).starts_with("target_pages has 2 entries and source_pages 1"));
    assert_eq!(refused(&[0, 4], &[0, 1], 0..2), "target_pages[1] is 4, allowed is 0 to 3");
    assert_eq!(refused(&[0], &[u32::MAX], 0..2), "source_pages[0] is 4294967295, allowed is 0 to 3");
    assert_eq!(refused(&[1, 3, 1], &[0, 1, 2], 0..2), "target_pages[2] is 1, which was named before");
    assert_eq!(refused(&[0], &[0], 1..3), "planes 1 to 3 are not in target, which has 2");
    #[expect(clippy::reversed_empty_ranges)]
    {
        assert_eq!(refused(&[0], &[0], 2..1), "planes 2 to 1 are not in target, which has 2");
    }
    let other = Geometry { tokens: 1, ..plain().geometry };
    let mut three = Pool { geometry: other, ..plain() };
    let narrow = three.planes();
    let text = PageCopy::new(&target, &[0], &narrow, &[0], 0..2).err().unwrap().to_string();
    assert!(text.contains("(2, 2, 8), source of (1, 2, 8)"), "{text}");
    // A source page may be copied to many.
    assert!(PageCopy::new(&target, &[0, 1], &source, &[2, 2], 0..2).is_ok());
}

#[test]
fn memory_that_target_and_source_share_is_refused() {
    let mut pool = plain();
    let planes = pool.planes();
    let text = PageCopy::new(&planes, &[0], &planes, &[1], 0..2).err().unwrap().to_string();
    assert_eq!(text, "target and source share memory: plane 0 of target is in both");
    // Planes of the one between those of the other, which is fine as long as none reaches into another.
    let mut bytes = vec![0u8; 512];
    let base = bytes.as_mut_ptr();
    let side = |starts: [usize; 2]| {
        let starts = starts.iter().map(|&start| base.wrapping_add(start)).collect();
        // SAFETY: planes of 128 bytes, which end at 512 at the latest.
        unsafe { Planes::new(plain().geometry, starts) }.unwrap()
    };
    let (even, odd, across) = (side([0, 256]), side([128, 384]), side([0, 320]));
    assert!(PageCopy::new(&even, &[0], &odd, &[1], 0..2).is_ok());
    let text = PageCopy::new(&across, &[0], &odd, &[1], 0..2).err().unwrap().to_string();
    assert!(text.contains("plane 1 of target"), "{text}");
    assert!(PageCopy::new(&across, &[0], &odd, &[1], 0..1).is_ok());
}

#[test]
fn planes_that_can_not_be_are_refused() {
    let mut pool = plain();
    let base = pool.bytes.as_mut_ptr();
    let refused = |starts: &[usize]| {
        let starts = starts.iter().map(|&start| base.wrapping_add(start)).collect();
        // SAFETY: they are refused; if not, planes of 128 bytes end at 256 at the latest.
        unsafe { Planes::new(pool.geometry, starts) }.unwrap_err().to_string()
    };
    assert_eq!(refused(&[]), "planes has 0 entries, allowed is 1 or more");
    assert_eq!(refused(&[0, 0]), "planes[0] and planes[1] have runs that overlap");
    assert_eq!(refused(&[128, 1, 127]), "planes[1] and planes[2] have runs that overlap");
    let geometry = Geometry { page_stride: 31, ..pool.geometry };
    // SAFETY: as above.
    assert!(unsafe { Planes::new(geometry, vec![base]) }.is_err());
}
