//! A copy of pages: checked when it is made, split over threads when it runs.

use std::ops::{ControlFlow, Range};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use crate::error::{Result, bad_argument};
use crate::planes::Planes;
use crate::route::{BUFFER_BYTES, Buffer, Route, Unit};
use crate::stores::{Put, fence, put_cached, put_streaming};

/// Copies of at least so many bytes go past the cache.
const STREAMING_FROM: usize = 1 << 20;

/// A thread is worth its start (some 20 µs) for so many bytes.
const THREAD_BYTES: usize = 1 << 20;

/// Threads take work in parts of so many bytes: one that is held up leaves the rest to the others.
const PART_BYTES: usize = 256 << 10;

/// Some pages from one pool to another one. That everything fits is known as soon as there is one.
pub struct PageCopy<'a> {
    target: &'a Planes,
    source: &'a Planes,
    /// Pages of target and source. Our own: a caller's list could change after it was checked.
    pages: Vec<(u32, u32)>,
    planes: Range<usize>,
}

impl<'a> PageCopy<'a> {
    /// The copy of `source_pages` to `target_pages`, one by one, in the planes of that range.
    ///
    /// Errors: pages of different shapes; lists of different lengths; a page or a plane that is not in its pool; a
    /// target page that is named twice; pools that share memory.
    pub fn new(
        target: &'a Planes,
        target_pages: &[u32],
        source: &'a Planes,
        source_pages: &[u32],
        planes: Range<usize>,
    ) -> Result<Self> {
        let shape = |planes: &Planes| {
            let geometry = planes.geometry();
            (geometry.tokens, geometry.heads, geometry.run_bytes)
        };
        if shape(target) != shape(source) {
            return Err(bad_argument!(
                "target has pages of (tokens, heads, run_bytes) {:?}, source of {:?}: they must be the same",
                shape(target),
                shape(source)
            ));
        }
        for (name, side) in [("target", target), ("source", source)] {
            if planes.start > planes.end || planes.end > side.count() {
                return Err(bad_argument!(
                    "planes {} to {} are not in {name}, which has {}",
                    planes.start,
                    planes.end,
                    side.count()
                ));
            }
        }
        if target_pages.len() != source_pages.len() {
            return Err(bad_argument!(
                "target_pages has {} entries and source_pages {}: a copy needs as many of the one as of the other",
                target_pages.len(),
                source_pages.len()
            ));
        }
        for (name, pages, side) in
            [("target_pages", target_pages, target), ("source_pages", source_pages, source)]
        {
            let count = side.geometry().pages;
            if let Some(at) = pages.iter().position(|&page| page as usize >= count) {
                return Err(bad_argument!("{name}[{at}] is {}, allowed is 0 to {}", pages[at], count - 1));
            }
        }
        // Two copies to one page would race.
        let mut seen = vec![0u64; target.geometry().pages.div_ceil(64)];
        for (at, &page) in target_pages.iter().enumerate() {
            let (word, bit) = (&mut seen[page as usize / 64], 1 << (page % 64));
            if *word & bit != 0 {
                return Err(bad_argument!("target_pages[{at}] is {page}, which was named before"));
            }
            *word |= bit;
        }
        if let Some(plane) = target.first_shared(source, planes.clone()) {
            return Err(bad_argument!("target and source share memory: plane {plane} of target is in both"));
        }
        let pages = target_pages.iter().copied().zip(source_pages.iter().copied()).collect();
        Ok(Self { target, source, pages, planes })
    }

    /// Bytes that are moved.
    pub fn bytes(&self) -> usize {
        self.units() * self.target.geometry().page_bytes()
    }

    fn units(&self) -> usize {
        self.pages.len() * self.planes.len()
    }

    /// Moves the bytes, on this thread and at most `threads - 1` others; they are there when it returns.
    ///
    /// The planes are taken in steps of `step` (0: all at once), and `arrived` is called on this thread with the number
    /// of each step, in order, as soon as its bytes are there. What it breaks off with is returned; what had not
    /// been begun by then stays as it was.
    ///
    /// # Safety
    /// Until it returns nobody else may write the source's pages, or read or write the target's, in these planes; but
    /// the planes of a step are the caller's again when it has arrived.
    pub unsafe fn run<B>(
        &self,
        threads: usize,
        step: usize,
        arrived: impl FnMut(usize) -> ControlFlow<B>,
    ) -> ControlFlow<B> {
        // SAFETY: handed on.
        unsafe { self.run_with(threads, step, arrived, self.bytes() >= STREAMING_FROM, THREAD_BYTES) }
    }

    /// # Safety
    /// See [`PageCopy::run`].
    unsafe fn run_with<B>(
        &self,
        threads: usize,
        step: usize,
        mut arrived: impl FnMut(usize) -> ControlFlow<B>,
        streaming: bool,
        thread_bytes: usize,
    ) -> ControlFlow<B> {
        let route = Route::new(self.target.geometry(), self.source.geometry(), streaming);
        let put = if streaming { put_streaming() } else { put_cached };
        let threads = threads.min(self.bytes() / thread_bytes).min(self.units());
        let parts = self.parts(if step == 0 { self.planes.len() } else { step }, threads);
        let progress = Progress::new(parts.steps, parts.in_step);
        // SAFETY: handed on; no part is taken twice.
        let work = |part: usize| unsafe { self.copy_units(&route, parts.units(part), put) };
        if threads <= 1 {
            while progress.work_on_one(work) {
                progress.report(&mut arrived)?;
            }
            return progress.report(&mut arrived);
        }
        thread::scope(|scope| {
            for _ in 1..threads {
                // Without a thread more its share is done by those that there are.
                let helper = || while progress.work_on_one(work) {};
                if thread::Builder::new().spawn_scoped(scope, helper).is_err() {
                    break;
                }
            }
            while progress.work_on_one(work) {
                if let ControlFlow::Break(reason) = progress.report(&mut arrived) {
                    progress.stop();
                    return ControlFlow::Break(reason);
                }
            }
            ControlFlow::Continue(())
        })?;
        // The others have ended too.
        progress.report(&mut arrived)
    }

    /// How the work is cut for so many threads.
    fn parts(&self, step: usize, threads: usize) -> Parts {
        let (planes, pages) = (self.planes.len(), self.pages.len());
        let units = pages * step.min(planes);
        let size = if threads <= 1 {
            units
        } else {
            (PART_BYTES / self.target.geometry().page_bytes()).min(units.div_ceil(threads))
        };
        let size = size.max(1);
        Parts {
            planes,
            pages,
            step,
            size,
            steps: planes.div_ceil(step.max(1)),
            in_step: units.div_ceil(size),
        }
    }

    /// Copies some units.
    ///
    /// # Safety
    /// See [`PageCopy::run`], for the pages and planes of these units.
    unsafe fn copy_units(&self, route: &Route, units: impl Iterator<Item = (usize, usize)>, put: Put) {
        let units = units.map(|(page, plane)| {
            let (target, source) = self.pages[page];
            let at = |side: &Planes, page: u32| {
                let start = side.start(self.planes.start + plane);
                start.wrapping_add(page as usize * side.geometry().page_stride)
            };
            Unit { target: at(self.target, target), source: at(self.source, source).cast_const() }
        });
        // SAFETY: every plane and page was found to be in its pool when this copy was made, and all runs of a pool
        // are in memory that is valid as long as its `Planes` (their contract). Runs of a pool do not overlap, which
        // `Planes::new` has checked, no target page is named twice, and target and source share nothing: `new` has
        // checked that. The rest is this function's contract.
        unsafe { route.copy(units, &mut Buffer([0; BUFFER_BYTES]), put) };
        fence();
    }
}

/// The work of a copy, cut into parts: a step has all pages of some planes, a part some of its units.
#[derive(Clone, Copy)]
struct Parts {
    planes: usize,
    pages: usize,
    /// Planes of a step; the last one may have fewer.
    step: usize,
    /// Units of a part; the last one of a step may have fewer.
    size: usize,
    steps: usize,
    /// Parts of each step. In a last step that is smaller, the last of them may be empty.
    in_step: usize,
}

impl Parts {
    /// The units of a part: indices of page and plane, the planes of a page one after the other.
    fn units(self, part: usize) -> impl Iterator<Item = (usize, usize)> {
        let (step, part) = (part / self.in_step, part % self.in_step);
        let first = step * self.step;
        let planes = self.step.min(self.planes - first);
        let units = part * self.size..((part + 1) * self.size).min(self.pages * planes);
        units.map(move |unit| (unit / planes, first + unit % planes))
    }
}

/// Which parts are taken, and which steps are complete.
struct Progress {
    parts: usize,
    in_step: usize,
    taken: AtomicUsize,
    /// Parts of each step that have ended.
    ended: Vec<AtomicUsize>,
    /// Steps that were reported; only the thread that reports uses it.
    reported: AtomicUsize,
}

impl Progress {
    fn new(steps: usize, in_step: usize) -> Self {
        let ended = (0..steps).map(|_| AtomicUsize::new(0)).collect();
        Self {
            parts: steps * in_step,
            in_step,
            taken: AtomicUsize::new(0),
            ended,
            reported: AtomicUsize::new(0),
        }
    }

    /// Does the next part that nobody has taken; false if there is none.
    fn work_on_one(&self, work: impl Fn(usize)) -> bool {
        let part = self.taken.fetch_add(1, Ordering::Relaxed);
        if part >= self.parts {
            return false;
        }
        work(part);
        // With the bytes of the part before it, for whoever sees the count.
        self.ended[part / self.in_step].fetch_add(1, Ordering::Release);
        true
    }

    /// No part is taken any more.
    fn stop(&self) {
        self.taken.store(self.parts, Ordering::Relaxed);
    }

    /// Says which steps are complete, in order.
    fn report<B>(&self, arrived: &mut impl FnMut(usize) -> ControlFlow<B>) -> ControlFlow<B> {
        loop {
            let step = self.reported.load(Ordering::Relaxed);
            match self.ended.get(step) {
                Some(ended) if ended.load(Ordering::Acquire) == self.in_step => {
                    self.reported.store(step + 1, Ordering::Relaxed);
                    arrived(step)?;
                }
                _ => return ControlFlow::Continue(()),
            }
        }
    }
}

#[cfg(test)]
mod tests;
