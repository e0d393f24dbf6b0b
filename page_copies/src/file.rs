//! Objects that are read from a file, and their checksums on the way.

use std::io;
use std::ops::Range;
use std::os::fd::RawFd;

use crate::sums::Sum;

/// Bytes that are read at a time where a checksum is wanted: when it is made they are still in the second-level cache,
/// where the kernel's copy has left them.
const STEP: usize = 128 << 10;

/// Memory that an object is read into.
#[derive(Clone, Copy)]
pub struct Place {
    /// Of the header.
    pub header: *mut u8,
    /// Bytes of the header.
    pub header_bytes: usize,
    /// Of the body.
    pub body: *mut u8,
    /// Bytes of the body.
    pub body_bytes: usize,
}

// SAFETY: addresses and sizes alone; whoever uses them promises what `read_object` asks for.
unsafe impl Send for Place {}

/// Reads a header, and the body that follows it, from the beginning of a file.
///
/// `covered`: bytes at the front of the header that count for the checksum; `None`: none is made.
///
/// Returns how many bytes there were, header included, and the checksum: 0 if none was wanted, or not all bytes were
/// there.
///
/// # Safety
/// The memory must be valid for that many bytes, and nobody else may use it until this returns. `covered` is at most the
/// bytes of the header. The file must stay open.
pub unsafe fn read_object(file: RawFd, place: Place, covered: Option<usize>) -> io::Result<(usize, u64)> {
    let total = place.header_bytes + place.body_bytes;
    if covered.is_some() && total > STEP {
        // So that the disk goes on while checksums are made. That it can not be said changes nothing.
        // SAFETY: numbers alone.
        unsafe {
            libc::posix_fadvise(file, 0, total.cast_signed() as libc::off_t, libc::POSIX_FADV_WILLNEED)
        };
    }
    // SAFETY: this function's contract; `read` is given parts of the memory, and fills as much as it says.
    unsafe { read_by(|part, at| read_part(file, place, part, at), place, covered) }
}

/// The same, by a call that reads a part of header and body, counted as one, from an offset that is its beginning.
///
/// # Safety
/// See [`read_object`]. Parts are never empty, and lie within header and body. The call says how many bytes from the front
/// of the part are there now.
unsafe fn read_by(
    mut read: impl FnMut(Range<usize>, u64) -> io::Result<usize>,
    place: Place,
    covered: Option<usize>,
) -> io::Result<(usize, u64)> {
    let total = place.header_bytes + place.body_bytes;
    let mut sum = None;
    let mut done = 0;
    loop {
        let end =
            if covered.is_some() { total.min(place.header_bytes + body_end(done, place)) } else { total };
        while done < end {
            match read(done..end, done as u64) {
                Ok(0) => return Ok((done, 0)),
                Ok(count) => done += count.min(end - done),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        let Some(covered) = covered else { return Ok((done, 0)) };
        // SAFETY: `end` is not within the header, so all of that was read, and of the body what comes before `end`; nobody
        // writes it any more. `covered` is at most the bytes of the header.
        let (header, body) =
            unsafe { (slice(place.header, covered), slice(place.body, done - place.header_bytes)) };
        let mut known = sum.unwrap_or_else(|| Sum::new(header, place.body_bytes));
        if done == total {
            return Ok((done, known.value(body)));
        }
        known.add(body);
        sum = Some(known);
    }
}

/// Where in the body the step ends that begins after `done` bytes of header and body.
fn body_end(done: usize, place: Place) -> usize {
    done.saturating_sub(place.header_bytes) + STEP
}

/// # Safety
/// So many bytes from `start` on must be initialised memory, which nobody writes for `'a`.
unsafe fn slice<'a>(start: *const u8, bytes: usize) -> &'a [u8] {
    if bytes == 0 {
        return &[];
    }
    // SAFETY: this function's contract.
    unsafe { std::slice::from_raw_parts(start, bytes) }
}

/// Reads a part of header and body, counted as one.
///
/// # Safety
/// See [`read_object`]; the part lies within header and body.
unsafe fn read_part(file: RawFd, place: Place, part: Range<usize>, offset: u64) -> io::Result<usize> {
    let in_header = part.start.min(place.header_bytes)..part.end.min(place.header_bytes);
    let in_body = part.start.saturating_sub(place.header_bytes)..part.end.saturating_sub(place.header_bytes);
    let piece = |start: *mut u8, range: &Range<usize>| libc::iovec {
        iov_base: start.wrapping_add(range.start).cast(),
        iov_len: range.len(),
    };
    let pieces = [piece(place.header, &in_header), piece(place.body, &in_body)];
    let offset = libc::off_t::try_from(offset).map_err(|_| io::Error::from_raw_os_error(libc::EFBIG))?;
    // SAFETY: two pieces, of memory that the kernel may write by this function's contract.
    let count = unsafe { libc::preadv(file, pieces.as_ptr(), 2, offset) };
    usize::try_from(count).map_err(|_| io::Error::last_os_error())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::hash::Hasher;

    use twox_hash::XxHash3_64;

    fn checksum(header: &[u8], body: &[u8]) -> u64 {
        let mut hasher = XxHash3_64::new();
        hasher.write(header);
        hasher.write(body);
        hasher.finish()
    }

    /// Reads `content`, at most `most` bytes at a time and every other time not at all, to a header and a body.
    fn check(content: &[u8], header_bytes: usize, body_bytes: usize, covered: Option<usize>, most: usize) {
        let (mut header, mut body) = (vec![0xEE; header_bytes + 1], vec![0xEE; body_bytes + 1]);
        let place = Place { header: header.as_mut_ptr(), header_bytes, body: body.as_mut_ptr(), body_bytes };
        let mut calls = 0;
        let read = |part: Range<usize>, offset: u64| {
            assert!(part.start < part.end && part.start as u64 == offset);
            calls += 1;
            if calls % 2 == 0 {
                return Err(io::ErrorKind::Interrupted.into());
            }
            let left = content.get(part.start..).unwrap_or_default();
            let count = left.len().min(part.len()).min(most);
            for (at, &byte) in (part.start..).zip(&left[..count]) {
                let place = if at < header_bytes {
                    place.header.wrapping_add(at)
                } else {
                    place.body.wrapping_add(at - header_bytes)
                };
                // SAFETY: within header and body, as far as the content goes.
                unsafe { place.write(byte) };
            }
            Ok(count)
        };
        // SAFETY: both have as many bytes, and nobody else uses them.
        let (done, sum) = unsafe { read_by(read, place, covered) }.unwrap();
        let total = header_bytes + body_bytes;
        assert_eq!(done, total.min(content.len()));
        let whole: Vec<u8> = [&header[..header_bytes], &body[..body_bytes]].concat();
        assert!(whole[..done] == content[..done] && whole[done..].iter().all(|&byte| byte == 0xEE));
        assert_eq!((header[header_bytes], body[body_bytes]), (0xEE, 0xEE));
        let expected = match covered {
            Some(covered) if done == total => checksum(&content[..covered], &content[header_bytes..total]),
            _ => 0,
        };
        assert_eq!(sum, expected, "{total} bytes by {most}");
    }

    #[test]
    fn reads_that_stop_anywhere() {
        let longest = if cfg!(miri) { 3000 } else { 2 * STEP + 500 };
        let content: Vec<u8> = (0..longest + 192).map(|i| (i * 7 + i / 251) as u8).collect();
        let sizes: &[usize] = if cfg!(miri) {
            &[0, 1, 3000]
        } else {
            &[0, 1, STEP - 1, STEP, STEP + 1, 2 * STEP, 2 * STEP + 500]
        };
        for &bytes in sizes {
            for most in [77, 192, 10_000, usize::MAX] {
                for covered in [None, Some(0), Some(184), Some(192)] {
                    check(&content, 192, bytes, covered, most);
                    for missing in [1, 300] {
                        check(&content[..(192 + bytes).saturating_sub(missing)], 192, bytes, covered, most);
                    }
                }
            }
        }
    }

    #[test]
    fn a_read_that_fails() {
        let (mut header, mut body) = ([0u8; 8], [0u8; 8]);
        let place =
            Place { header: header.as_mut_ptr(), header_bytes: 8, body: body.as_mut_ptr(), body_bytes: 8 };
        let failed = |_: Range<usize>, _: u64| Err(io::Error::from_raw_os_error(libc::EIO));
        // SAFETY: both have as many bytes, and nobody else uses them.
        let error = unsafe { read_by(failed, place, Some(8)) }.unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EIO));
    }

    #[test]
    #[cfg(not(miri))] // it knows no preadv
    fn of_a_file() {
        use std::os::fd::AsRawFd;

        let path = std::env::temp_dir().join(format!("page_copies-{}", std::process::id()));
        let content: Vec<u8> = (0..192 + 3 * STEP + 9).map(|i| (i * 11 + i / 255) as u8).collect();
        std::fs::write(&path, &content).unwrap();
        let file = std::fs::File::open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        for covered in [None, Some(184)] {
            let (mut header, mut body) = ([0; 192], vec![0; 3 * STEP + 10]);
            let mut place = Place {
                header: header.as_mut_ptr(),
                header_bytes: 192,
                body: body.as_mut_ptr(),
                body_bytes: 3 * STEP + 9,
            };
            // SAFETY: both have as many bytes, and nobody else uses them.
            let (done, sum) = unsafe { read_object(file.as_raw_fd(), place, covered) }.unwrap();
            assert_eq!(done, content.len());
            assert!(header[..] == content[..192] && body[..done - 192] == content[192..]);
            assert_eq!(sum, covered.map_or(0, |covered| checksum(&content[..covered], &content[192..])));
            place.body_bytes += 1;
            // SAFETY: the body has one byte more.
            let short = unsafe { read_object(file.as_raw_fd(), place, covered) }.unwrap();
            assert_eq!(short, (content.len(), 0));
        }
    }
}
