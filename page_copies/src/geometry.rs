//! Where the runs of a plane are, relative to its beginning.

use crate::error::{Result, bad_argument};

/// Counts and strides that all planes of a pool share; strides and `run_bytes` are in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Pages in the pool.
    pub pages: usize,
    /// Tokens a page.
    pub tokens: usize,
    /// Heads a token.
    pub heads: usize,
    /// Bytes of one head of one token, contiguous.
    pub run_bytes: usize,
    /// From a page to the next one, within a plane.
    pub page_stride: usize,
    /// From a token to the next one.
    pub token_stride: usize,
    /// From a head to the next one.
    pub head_stride: usize,
}

/// A dimension of a plane.
#[derive(Clone, Copy)]
struct Dim {
    count: usize,
    stride: usize,
    /// Bytes from the beginning to the end of one index of it.
    inner_span: usize,
}

impl Geometry {
    /// Bytes of a page in one plane.
    pub fn page_bytes(&self) -> usize {
        self.tokens * self.heads * self.run_bytes
    }

    /// Bytes from the beginning of a plane to the end of its last run.
    ///
    /// Errors: a count that is 0, runs that overlap, or more bytes than a pointer can cross.
    pub fn span_bytes(&self) -> Result<usize> {
        for (name, count) in [
            ("pages", self.pages),
            ("tokens", self.tokens),
            ("heads", self.heads),
            ("run_bytes", self.run_bytes),
        ] {
            if count == 0 {
                return Err(bad_argument!("{name} is 0, allowed is 1 or more"));
            }
        }
        let too_large = || bad_argument!("{self:?} is larger than the address space");
        let mut span = self.run_bytes;
        for dim in self.by_stride() {
            if dim.count > 1 && dim.stride < span {
                return Err(bad_argument!(
                    "page_stride {}, token_stride {} and head_stride {} make runs overlap: there is a stride of {} \
                     over what takes {span} bytes",
                    self.page_stride,
                    self.token_stride,
                    self.head_stride,
                    dim.stride
                ));
            }
            let reach = (dim.count - 1).checked_mul(dim.stride).ok_or_else(too_large)?;
            span = span.checked_add(reach).ok_or_else(too_large)?;
        }
        if isize::try_from(span).is_err() {
            return Err(too_large());
        }
        Ok(span)
    }

    /// Do runs of a plane and of another one that begins `distance` bytes later overlap? For a geometry of its own
    /// that is good.
    pub(crate) fn meets_itself_at(&self, distance: usize) -> bool {
        // The distance between two runs is a sum of multiples of the strides. A stride is at least as large as all
        // that lies inside it, so only the two multiples next to the distance can leave a rest that the inner
        // dimensions can make up for.
        let mut rests = vec![i128::try_from(distance).unwrap_or(i128::MAX)];
        for dim in self.by_stride().iter().rev() {
            let (stride, most) = (dim.stride as i128, dim.count as i128 - 1);
            if most == 0 {
                continue;
            }
            let inner_span = dim.inner_span as i128;
            rests = rests
                .iter()
                .flat_map(|rest| {
                    let below = rest.div_euclid(stride);
                    [below, below + 1].map(|steps| rest - steps.clamp(-most, most) * stride)
                })
                .filter(|rest| rest.abs() < inner_span)
                .collect();
        }
        rests.iter().any(|rest| rest.abs() < self.run_bytes as i128)
    }

    /// The dimensions, smallest stride first; those of one index come first, since their stride means nothing.
    fn by_stride(&self) -> [Dim; 3] {
        let mut dims = [
            (self.pages, self.page_stride),
            (self.tokens, self.token_stride),
            (self.heads, self.head_stride),
        ];
        dims.sort_unstable_by_key(|&(count, stride)| (count > 1, stride));
        let mut inner_span = self.run_bytes;
        dims.map(|(count, stride)| {
            let dim = Dim { count, stride, inner_span };
            inner_span = inner_span.saturating_add(count.saturating_sub(1).saturating_mul(stride));
            dim
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn geometry(counts: [usize; 4], strides: [usize; 3]) -> Geometry {
        let [pages, tokens, heads, run_bytes] = counts;
        let [page_stride, token_stride, head_stride] = strides;
        Geometry { pages, tokens, heads, run_bytes, page_stride, token_stride, head_stride }
    }

    /// Every byte of every run.
    fn bytes(geometry: &Geometry) -> Vec<usize> {
        let mut all = Vec::new();
        for page in 0..geometry.pages {
            for token in 0..geometry.tokens {
                for head in 0..geometry.heads {
                    let start = page * geometry.page_stride
                        + token * geometry.token_stride
                        + head * geometry.head_stride;
                    all.extend(start..start + geometry.run_bytes);
                }
            }
        }
        all
    }

    #[test]
    fn spans_and_overlaps_are_those_of_the_bytes() {
        let mut refused = 0;
        for counts in [[2, 3, 2, 3], [3, 1, 2, 1], [1, 1, 1, 4], [2, 2, 1, 2]] {
            for strides in (0..20usize.pow(3)).map(|i| [i % 20, i / 20 % 20, i / 400]) {
                let geometry = geometry(counts, strides);
                let mut all = bytes(&geometry);
                all.sort_unstable();
                match geometry.span_bytes() {
                    Ok(span) => {
                        assert_eq!(span, all.last().unwrap() + 1);
                        assert!(all.is_sorted_by(|a, b| a < b), "{geometry:?} overlaps");
                        for distance in 0..2 * span {
                            let meet = all.iter().any(|at| all.binary_search(&(at + distance)).is_ok());
                            assert_eq!(
                                geometry.meets_itself_at(distance),
                                meet,
                                "{geometry:?} at {distance}"
                            );
                        }
                    }
                    Err(_) => refused += 1,
                }
            }
        }
        assert!(refused > 0);
    }

    #[test]
    fn impossible_geometries_are_refused() {
        let text = |counts, strides| geometry(counts, strides).span_bytes().unwrap_err().to_string();
        assert_eq!(text([1, 1, 0, 1], [1, 1, 1]), "heads is 0, allowed is 1 or more");
        assert!(text([2, 2, 2, 8], [32, 16, 4]).contains("there is a stride of 4 over what takes 8 bytes"));
        for pages in [usize::MAX, 1 << 40, (1 << 30) + 1] {
            assert!(text([pages, 1, 1, 1], [1 << 33, 1, 1]).contains("larger than the address space"));
        }
        // A stride over one index is not one.
        assert_eq!(geometry([1, 1, 1, 4], [0, 0, usize::MAX]).span_bytes(), Ok(4));
    }
}
