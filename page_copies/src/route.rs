//! How the bytes of one page in one plane go from one side to the other.
//!
//! Measured on a 2-core EPYC against a contiguous copy of 15 GB/s: reading in the order of the source's memory and
//! streaming runs of 256 bytes to wherever they belong is fast (13 GB/s), reading such runs from far apart is slow
//! (3.5 GB/s). So a target that has together what the source has not is written from a small buffer, into which the
//! runs are gathered in the source's order, while those of the next tile are already asked for (11 GB/s).

use crate::geometry::Geometry;
use crate::stores::{LINE, Put, prefetch};

/// Bytes of the buffer: with what is read into it, it stays in the first-level cache.
pub(crate) const BUFFER_BYTES: usize = 8 << 10;

/// The buffer that runs are gathered in, one a thread.
#[repr(align(64))]
pub(crate) struct Buffer(pub [u8; BUFFER_BYTES]);

/// Runs from this size on are streamed as they are.
const LONG_RUN: usize = 4 << 10;

/// A target is written in pieces of so many bytes, so that requests for the next tile come between them.
const PIECE: usize = 256;

/// Indices that both sides have, and the way from one to the next on each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Dim {
    count: usize,
    target: usize,
    source: usize,
}

/// One page in one plane: where it begins on both sides.
#[derive(Clone, Copy)]
pub(crate) struct Unit {
    pub target: *mut u8,
    pub source: *const u8,
}

/// The way from source to target that a copy takes for each page in each plane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Route {
    tokens: Dim,
    heads: Dim,
    /// Bytes that are contiguous on both sides.
    run: usize,
    /// Gather runs first: tokens and heads of a tile, which fits into the buffer.
    tile: Option<(usize, usize)>,
}

/// A part of a unit that is gathered at once.
#[derive(Clone, Copy)]
struct Tile {
    unit: Unit,
    tokens: usize,
    heads: usize,
}

impl Route {
    /// The route between two geometries of the same page; `streaming`: the copy goes past the cache.
    pub fn new(target: &Geometry, source: &Geometry, streaming: bool) -> Self {
        let mut tokens =
            Dim { count: target.tokens, target: target.token_stride, source: source.token_stride };
        let mut heads = Dim { count: target.heads, target: target.head_stride, source: source.head_stride };
        let mut run = target.run_bytes;
        // What is contiguous on both sides is one run: all heads of a token, then all tokens.
        let contiguous = |dim: Dim, run| dim.count == 1 || (dim.target == run && dim.source == run);
        if contiguous(heads, run) {
            run *= heads.count;
            heads.count = 1;
            if contiguous(tokens, run) {
                run *= tokens.count;
                tokens.count = 1;
            }
        }
        let mut route = Self { tokens, heads, run, tile: None };
        if streaming && run < LONG_RUN {
            route.tile = route.tile();
        }
        route
    }

    /// The tile to gather, if the target has more than a run together.
    fn tile(&self) -> Option<(usize, usize)> {
        let Self { tokens, heads, run, .. } = *self;
        let row = heads.count * run;
        let rows_are_whole = heads.count == 1 || heads.target == run;
        let rows_touch = tokens.count > 1 && tokens.target == row;
        if !rows_are_whole || (heads.count == 1 && !rows_touch) {
            return None;
        }
        if row <= BUFFER_BYTES {
            Some(((BUFFER_BYTES / row).min(tokens.count), heads.count))
        } else {
            Some((1, BUFFER_BYTES / run))
        }
    }

    /// The outer and the inner loop that read in the order of the source's memory.
    fn in_source_order(&self) -> (Dim, Dim) {
        if self.heads.count > 1 && self.heads.source > self.tokens.source {
            (self.heads, self.tokens)
        } else {
            (self.tokens, self.heads)
        }
    }

    /// Copies the units in order.
    ///
    /// # Safety
    /// Every run of every unit is valid, to be written at the target and to be read at the source, no run of the
    /// target overlaps another one or one of the source, and nobody else uses them meanwhile.
    pub unsafe fn copy(&self, units: impl Iterator<Item = Unit>, buffer: &mut Buffer, put: Put) {
        let Some(tile) = self.tile else {
            let (outer, inner) = self.in_source_order();
            for unit in units {
                for i in 0..outer.count {
                    for j in 0..inner.count {
                        // SAFETY: the contract: these are the runs of the unit.
                        unsafe {
                            let target = unit.target.add(i * outer.target + j * inner.target);
                            let source = unit.source.add(i * outer.source + j * inner.source);
                            put(target, source, self.run);
                        }
                    }
                }
            }
            return;
        };
        let mut tiles = units.flat_map(|unit| self.tiles(unit, tile)).peekable();
        while let Some(tile) = tiles.next() {
            // SAFETY: a tile is a part of a unit; that it fits into the buffer is what `Route::tile` sees to.
            unsafe {
                self.gather(tile, buffer);
                self.scatter(tile, buffer, put, tiles.peek());
            }
        }
    }

    fn tiles(&self, unit: Unit, (tile_tokens, tile_heads): (usize, usize)) -> impl Iterator<Item = Tile> {
        let Self { tokens, heads, .. } = *self;
        let firsts = (0..tokens.count)
            .step_by(tile_tokens)
            .flat_map(move |token| (0..heads.count).step_by(tile_heads).map(move |head| (token, head)));
        firsts.map(move |(token, head)| Tile {
            unit: Unit {
                // Not beyond the unit, but `wrapping_add` needs no proof.
                target: unit.target.wrapping_add(token * tokens.target + head * heads.target),
                source: unit.source.wrapping_add(token * tokens.source + head * heads.source),
            },
            tokens: tile_tokens.min(tokens.count - token),
            heads: tile_heads.min(heads.count - head),
        })
    }

    /// The runs of a tile in the order of the source's memory, and where each is in the buffer.
    fn runs(&self, tile: Tile) -> impl Iterator<Item = (*const u8, usize)> {
        let run = self.run;
        let tokens = Dim { count: tile.tokens, target: tile.heads * run, source: self.tokens.source };
        let heads = Dim { count: tile.heads, target: run, source: self.heads.source };
        let (outer, inner) = Self { tokens, heads, ..*self }.in_source_order();
        (0..outer.count).flat_map(move |i| {
            (0..inner.count).map(move |j| {
                let source = tile.unit.source.wrapping_add(i * outer.source + j * inner.source);
                (source, i * outer.target + j * inner.target)
            })
        })
    }

    /// Source to buffer, where the tile's rows lie one after the other.
    ///
    /// # Safety
    /// The tile's runs are valid to be read, and they fit into the buffer.
    unsafe fn gather(&self, tile: Tile, buffer: &mut Buffer) {
        debug_assert!(tile.tokens * tile.heads * self.run <= BUFFER_BYTES);
        let start = buffer.0.as_mut_ptr();
        for (source, at) in self.runs(tile) {
            // SAFETY: the contract; `at` is the run's place among the runs of the tile.
            unsafe { std::ptr::copy_nonoverlapping(source, start.add(at), self.run) };
        }
    }

    /// Buffer to target, with requests for the next tile in between.
    ///
    /// # Safety
    /// `gather` has filled the buffer with this tile, whose place in the target is valid to be written.
    unsafe fn scatter(&self, tile: Tile, buffer: &Buffer, put: Put, next: Option<&Tile>) {
        let row = tile.heads * self.run;
        let rows_touch = self.tokens.target == row;
        let (rows, row) = if rows_touch { (1, tile.tokens * row) } else { (tile.tokens, row) };
        // Runs of less than a line are not far apart, or not worth it.
        let mut wanted = next.filter(|_| self.run >= LINE).map(|&next| Ahead::new(self.runs(next), self.run));
        for index in 0..rows {
            let mut at = 0;
            while at < row {
                // SAFETY: row `index` of the tile is contiguous in the target, as `Route::tile` saw, and in the
                // buffer; `at + bytes` is at most its length.
                unsafe {
                    let target = tile.unit.target.add(index * self.tokens.target + at);
                    // Pieces end where the target's lines do.
                    let bytes = (PIECE - target.addr() % LINE).min(row - at);
                    if let Some(ahead) = &mut wanted {
                        ahead.request(bytes);
                    }
                    put(target, buffer.0.as_ptr().add(index * row + at), bytes);
                    at += bytes;
                }
            }
        }
    }
}

/// Asks for the runs of a tile, little by little: too many requests at once would have to wait for each other.
struct Ahead<I> {
    runs: I,
    run: usize,
    /// What is left of the run that was asked for in part.
    at: *const u8,
    left: usize,
}

impl<I: Iterator<Item = (*const u8, usize)>> Ahead<I> {
    fn new(runs: I, run: usize) -> Self {
        Self { runs, run, at: std::ptr::null(), left: 0 }
    }

    /// Asks for the next so many bytes.
    fn request(&mut self, mut bytes: usize) {
        while bytes > 0 {
            if self.left == 0 {
                let Some((start, _)) = self.runs.next() else { return };
                (self.at, self.left) = (start, self.run);
            }
            let part = bytes.min(self.left);
            prefetch(self.at, part);
            self.at = self.at.wrapping_add(part);
            self.left -= part;
            bytes -= part;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn geometry(token_stride: usize, head_stride: usize) -> Geometry {
        Geometry {
            pages: 4,
            tokens: 64,
            heads: 8,
            run_bytes: 256,
            page_stride: 1 << 20,
            token_stride,
            head_stride,
        }
    }

    #[test]
    fn what_both_sides_have_together_is_one_run() {
        let together = geometry(2048, 256);
        let route = Route::new(&together, &together, true);
        assert_eq!((route.tokens.count, route.heads.count, route.run), (1, 1, 64 * 2048));
        assert_eq!(route.tile, None);
        let apart = geometry(8192, 256); // page_first
        let route = Route::new(&apart, &together, true);
        assert_eq!((route.tokens.count, route.heads.count, route.run), (64, 1, 2048));
        let heads_apart = geometry(1024, 1 << 16); // page_head
        let route = Route::new(&heads_apart, &together, true);
        assert_eq!((route.tokens.count, route.heads.count, route.run), (64, 8, 256));
        // Tokens that are contiguous by chance do not count as long as heads are apart.
        assert_eq!(Route::new(&geometry(256, 1 << 14), &geometry(256, 1 << 14), true).run, 256);
    }

    #[test]
    fn runs_are_gathered_where_the_target_has_them_together() {
        let together = geometry(2048, 256);
        for apart in [geometry(8192, 256), geometry(1024, 1 << 16)] {
            assert_eq!(Route::new(&apart, &together, true).tile, None);
            let route = Route::new(&together, &apart, true);
            assert_eq!(route.tile, Some((4, route.heads.count)));
            assert_eq!(Route::new(&together, &apart, false).tile, None);
            assert_eq!(Route::new(&apart, &apart, true).tile, None);
        }
        // Rows that are whole, but apart.
        assert_eq!(Route::new(&geometry(4096, 256), &geometry(1024, 1 << 16), true).tile, Some((4, 8)));
        // Rows that do not fit into the buffer are cut between heads.
        let wide = |head_stride| Geometry { run_bytes: 2048, ..geometry(8 * 2048, head_stride) };
        assert_eq!(Route::new(&wide(2048), &wide(1 << 20), true).tile, Some((1, 4)));
        // Long runs go as they are.
        let long = |head_stride| Geometry { run_bytes: 4096, ..geometry(8 * 4096, head_stride) };
        assert_eq!(Route::new(&long(4096), &long(1 << 20), true).tile, None);
    }

    #[test]
    fn reading_follows_the_source() {
        let (together, heads_apart) = (geometry(2048, 256), geometry(1024, 1 << 16));
        let outer = |target, source| Route::new(target, source, true).in_source_order().0.count;
        assert_eq!(outer(&together, &heads_apart), 8);
        assert_eq!(outer(&heads_apart, &together), 64);
    }
}
