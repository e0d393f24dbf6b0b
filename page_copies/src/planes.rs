//! The memory of a pool.

use std::ops::Range;

use crate::error::{Result, bad_argument};
use crate::geometry::Geometry;

/// The planes of a pool: where they begin, and the geometry that they share.
#[derive(Debug)]
pub struct Planes {
    geometry: Geometry,
    span_bytes: usize,
    starts: Vec<*mut u8>,
}

// SAFETY: the memory belongs to no thread, and nothing here reads or writes it except `PageCopy::run`, whose caller
// answers for who else does.
unsafe impl Send for Planes {}
// SAFETY: likewise; through a shared reference only addresses can be seen.
unsafe impl Sync for Planes {}

impl Planes {
    /// The planes that begin at `starts`.
    ///
    /// Errors: no plane, a bad geometry, planes of which runs overlap.
    ///
    /// # Safety
    /// At each start there must be [`Geometry::span_bytes`] bytes that can be read and written, and that stay where
    /// they are as long as this value lives.
    pub unsafe fn new(geometry: Geometry, starts: Vec<*mut u8>) -> Result<Self> {
        let span_bytes = geometry.span_bytes()?;
        if starts.is_empty() {
            return Err(bad_argument!("planes has 0 entries, allowed is 1 or more"));
        }
        let mut order: Vec<usize> = (0..starts.len()).collect();
        order.sort_unstable_by_key(|&plane| starts[plane].addr());
        for (at, &plane) in order.iter().enumerate() {
            for &later in &order[at + 1..] {
                let distance = starts[later].addr() - starts[plane].addr();
                if distance >= span_bytes {
                    break;
                }
                if geometry.meets_itself_at(distance) {
                    let (one, other) = (plane.min(later), plane.max(later));
                    return Err(bad_argument!("planes[{one}] and planes[{other}] have runs that overlap"));
                }
            }
        }
        Ok(Self { geometry, span_bytes, starts })
    }

    /// The geometry that the planes share.
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// How many planes there are.
    pub fn count(&self) -> usize {
        self.starts.len()
    }

    pub(crate) fn start(&self, plane: usize) -> *mut u8 {
        self.starts[plane]
    }

    /// The first plane of `range` whose bytes, from its first to its last, are among those of a plane of `other`.
    pub(crate) fn first_shared(&self, other: &Self, range: Range<usize>) -> Option<usize> {
        let spans = |planes: &Self| -> Vec<Range<usize>> {
            let starts = &planes.starts[range.clone()];
            starts.iter().map(|start| start.addr()..start.addr() + planes.span_bytes).collect()
        };
        let (own, others) = (spans(self), spans(other));
        let hull = |spans: &[Range<usize>]| {
            let start = spans.iter().map(|span| span.start).min();
            start.zip(spans.iter().map(|span| span.end).max())
        };
        let ((start, end), (other_start, other_end)) = (hull(&own)?, hull(&others)?);
        if end <= other_start || other_end <= start {
            return None; // as it is for two pools of their own
        }
        let meets =
            |span: &Range<usize>| others.iter().any(|other| span.start < other.end && other.start < span.end);
        own.iter().position(meets).map(|at| range.start + at)
    }
}
