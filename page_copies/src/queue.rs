//! Bodies that lie in a file: many are asked for at once, and checksums are made while the disk is at work.
//!
//! This is the kernel's asynchronous I/O (`man 2 io_submit`), for files that are open with `O_DIRECT`. Threads that read a
//! part each and make its checksums end at about the same time, and the disk rests while they do; here it always has the
//! next parts to go on with. `io_uring` could do the same, but container runtimes forbid it as a rule.

use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Bytes from which bodies that are neighbours are no longer asked for together: a disk gains little from more.
const TOGETHER: usize = 512 << 10;
/// Bodies in one request at most; the kernel takes 1024.
const MOST_TOGETHER: usize = 256;
/// Requests under way at most: with more the kernel would make the one who asks wait until the disk takes them.
const DEPTH: usize = 128;
/// Bytes that keep any disk busy, in two requests or more.
const BUSY: usize = 1 << 20;
/// A pace of one: `seen` takes as long over a byte as the disk.
const SAME_PACE: usize = 1024;
/// The pace before any was measured, and the bounds within which one is believed.
const FIRST_PACE: usize = SAME_PACE / 2;
const PACES: (usize, usize) = (SAME_PACE / 32, SAME_PACE);
/// A call with fewer bytes says nothing of it.
const PACE_BYTES: usize = 4 << 20;

// `linux/aio_abi.h`.
const READ: u16 = 7;
const WRITE: u16 = 8;

/// Which way bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// From the file to memory.
    Read,
    /// From memory to the file.
    Write,
}

/// Memory, and the bytes of the file that belong there.
#[derive(Clone, Copy)]
pub struct Body {
    /// The first byte in memory.
    pub start: *mut u8,
    /// How many.
    pub bytes: usize,
    /// Where the first one is in the file.
    pub offset: u64,
}

// SAFETY: addresses and numbers alone; whoever uses them promises what `transfer` asks for.
unsafe impl Send for Body {}
// SAFETY: likewise.
unsafe impl Sync for Body {}

/// What the kernel keeps of requests that are under way: made when a call finds none that is idle, and kept for the next.
pub struct Queue {
    idle: Mutex<Vec<Context>>,
    /// What `seen` takes of a byte that was read by what the disk takes of it, in the last calls.
    pace: AtomicUsize,
}

impl Queue {
    /// # Errors
    /// The kernel has no such thing, forbids it, or has no more of it (`fs.aio-max-nr`).
    pub fn new() -> io::Result<Self> {
        Ok(Self { idle: Mutex::new(vec![Context::new()?]), pace: AtomicUsize::new(FIRST_PACE) })
    }

    /// Moves bodies from or to a file that is open with `O_DIRECT`, all of them at once as far as the disk goes along.
    ///
    /// `seen`, if given, is called with the number of a body once its bytes are there: of one that is read, after that; of
    /// one that is written, at any time. It is not called for one that could not be read, and for each other one once.
    ///
    /// Returns which of them were moved, each as a whole. What became of the others is unknown; they can be tried again in
    /// another way, which will tell why. Nothing is under way any more when this returns or panics.
    ///
    /// # Safety
    /// The bodies must be valid memory that does not overlap, and nobody else may use it until this returns but to read what
    /// is written to the file. The file must stay open.
    pub unsafe fn transfer(
        &self,
        file: RawFd,
        way: Way,
        bodies: &[Body],
        mut seen: Option<&mut dyn FnMut(usize)>,
    ) -> Vec<bool> {
        let mut moved = vec![false; bodies.len()];
        let Ok(context) = self.take() else { return moved };
        let pieces: Vec<libc::iovec> = bodies
            .iter()
            .map(|body| libc::iovec { iov_base: body.start.cast(), iov_len: body.bytes })
            .collect();
        let groups = groups(bodies);
        let mut requests: Vec<libc::iocb> = groups
            .iter()
            .enumerate()
            .map(|(at, group)| request(file, way, at, &pieces[group.clone()], bodies[group.start].offset))
            .collect();
        let request_bytes = bodies.iter().map(|body| body.bytes).sum::<usize>() / groups.len().max(1);
        let mut call = Call { queue: self, context: Some(context), under_way: 0 };
        let mut next = 0;
        let pace = (way == Way::Read && seen.is_some()).then(|| self.pace.load(Ordering::Relaxed));
        let begun = Instant::now();
        let mut disk_time = Duration::ZERO;
        let mut seen_time = Duration::ZERO;
        // Groups whose bytes are there, and were not shown yet.
        let mut unseen: VecDeque<usize> = match way {
            Way::Write if seen.is_some() => (0..groups.len()).collect(),
            _ => VecDeque::new(),
        };
        loop {
            let left = requests.len() - next + call.under_way;
            let depth = pace.map_or(DEPTH, |pace| depth(left, request_bytes, pace));
            // SAFETY: this function's contract; `pieces` and `requests` stay where they are.
            unsafe { call.submit(&mut requests, &mut next, depth) };
            if call.under_way == 0 && unseen.is_empty() {
                // One that went wrong says nothing of the disk.
                if let Some(pace) = pace.filter(|_| moved.iter().all(|&all| all)) {
                    self.learn(pace, bodies.iter().map(|body| body.bytes).sum(), seen_time, disk_time);
                }
                return moved;
            }
            let Ok(ended) = call.ended(unseen.is_empty()) else {
                // Nobody can tell what has ended.
                return vec![false; bodies.len()];
            };
            let news = !ended.is_empty();
            if news {
                disk_time = begun.elapsed();
            }
            for (at, result) in ended {
                let group = groups[at].clone();
                if usize::try_from(result) == Ok(bodies[group.clone()].iter().map(|body| body.bytes).sum()) {
                    moved[group].fill(true);
                    if way == Way::Read && seen.is_some() {
                        unseen.push_back(at);
                    }
                }
            }
            if news && next < requests.len() {
                continue; // the disk may have nothing to do just now
            }
            if let (Some(at), Some(seen)) = (unseen.pop_front(), &mut seen) {
                let start = Instant::now();
                groups[at].clone().for_each(seen);
                seen_time += start.elapsed();
            }
        }
    }

    /// Threads may overwrite what others have learned meanwhile: all of it is about the same disk.
    fn learn(&self, pace: usize, bytes: usize, seen_time: Duration, disk_time: Duration) {
        if bytes >= PACE_BYTES {
            self.pace.store(learned(pace, seen_time, disk_time), Ordering::Relaxed);
        }
    }

    fn take(&self) -> io::Result<Context> {
        let idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
        idle.map_or_else(Context::new, Ok)
    }

    fn give_back(&self, context: Context) {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).push(context);
    }
}

/// How many of the requests that have not ended may be under way.
///
/// Not all of them: a virtual disk may tell of none before the last one has ended, and nothing would be left to do for it
/// while `seen` is shown what has come. And as many as can be: each time that it has ended all it rests until it is asked for
/// more. So `seen` is to take as long over those under way as the disk over what is left after them: `pace` is what `seen`
/// takes of a byte by what the disk takes.
fn depth(left: usize, request_bytes: usize, pace: usize) -> usize {
    let share = left * SAME_PACE / (SAME_PACE + pace);
    share.max(BUSY / request_bytes.max(1)).clamp(2, DEPTH)
}

/// The pace, a quarter of it that of a call in which `seen` and the disk took so long.
fn learned(pace: usize, seen_time: Duration, disk_time: Duration) -> usize {
    let now = seen_time.as_nanos() * SAME_PACE as u128 / disk_time.as_nanos().max(1);
    let now = usize::try_from(now).unwrap_or(PACES.1).clamp(PACES.0, PACES.1);
    (3 * pace + now) / 4
}

/// Bodies of one request each: neighbours in the file.
fn groups(bodies: &[Body]) -> Vec<Range<usize>> {
    let mut groups: Vec<Range<usize>> = Vec::new();
    let mut together = 0;
    for (at, body) in bodies.iter().enumerate() {
        match groups.last_mut() {
            Some(group)
                if together + body.bytes <= TOGETHER
                    && group.len() < MOST_TOGETHER
                    && bodies[at - 1].offset.checked_add(bodies[at - 1].bytes as u64)
                        == Some(body.offset) =>
            {
                group.end = at + 1;
                together += body.bytes;
            }
            _ => {
                groups.push(at..at + 1);
                together = body.bytes;
            }
        }
    }
    groups
}

fn request(file: RawFd, way: Way, at: usize, pieces: &[libc::iovec], offset: u64) -> libc::iocb {
    // SAFETY: a struct of numbers, all of which may be 0.
    let mut request: libc::iocb = unsafe { std::mem::zeroed() };
    request.aio_data = at as u64;
    request.aio_lio_opcode = match way {
        Way::Read => READ,
        Way::Write => WRITE,
    };
    request.aio_fildes = file.cast_unsigned();
    request.aio_buf = pieces.as_ptr().addr() as u64;
    request.aio_nbytes = pieces.len() as u64;
    request.aio_offset = offset.cast_signed();
    request
}

/// `aio_context_t`.
struct Context(libc::c_ulong);

impl Context {
    fn new() -> io::Result<Self> {
        let mut context: libc::c_ulong = 0;
        // SAFETY: the kernel writes a number.
        match unsafe { libc::syscall(libc::SYS_io_setup, DEPTH, &raw mut context) } {
            0 => Ok(Self(context)),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

impl Drop for Context {
    /// Waits for what is under way.
    fn drop(&mut self) {
        // SAFETY: it is ours, and nobody uses it after this.
        unsafe { libc::syscall(libc::SYS_io_destroy, self.0) };
    }
}

/// `struct io_event`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Event {
    data: u64,
    request: u64,
    result: i64,
    result2: i64,
}

/// What is under way. If this is dropped before everything has ended, it waits.
struct Call<'a> {
    queue: &'a Queue,
    context: Option<Context>,
    under_way: usize,
}

impl Call<'_> {
    fn number(&self) -> libc::c_ulong {
        self.context.as_ref().map_or(0, |context| context.0)
    }

    /// Asks for requests from `next` on until so many are under way; for none of them any more if the kernel refuses.
    ///
    /// # Safety
    /// Requests, and the memory that they are about, must stay until each has ended.
    unsafe fn submit(&mut self, requests: &mut [libc::iocb], next: &mut usize, depth: usize) {
        while *next < requests.len() && self.under_way < depth {
            let some = &mut requests[*next..];
            let most = some.len().min(depth - self.under_way);
            let mut some: Vec<*mut libc::iocb> = some[..most].iter_mut().map(std::ptr::from_mut).collect();
            // SAFETY: this function's contract.
            let taken = unsafe { libc::syscall(libc::SYS_io_submit, self.number(), most, some.as_mut_ptr()) };
            match usize::try_from(taken) {
                Ok(0) => *next = requests.len(),
                Ok(taken) => {
                    self.under_way += taken;
                    *next += taken;
                }
                Err(_) => match io::Error::last_os_error().raw_os_error() {
                    Some(libc::EINTR) => {}
                    // There is room once some have ended.
                    Some(libc::EAGAIN) if self.under_way > 0 => return,
                    _ => *next = requests.len(),
                },
            }
        }
    }

    /// The requests that have ended since, by their numbers, and what they came to; at least one if it is to wait.
    fn ended(&mut self, wait: bool) -> io::Result<Vec<(usize, i64)>> {
        if self.under_way == 0 {
            return Ok(Vec::new());
        }
        let mut events = [Event::default(); DEPTH];
        let least = usize::from(wait);
        loop {
            // SAFETY: the kernel writes up to so many of our events; the last argument says that it may take any time.
            let count = unsafe {
                libc::syscall(
                    libc::SYS_io_getevents,
                    self.number(),
                    least,
                    DEPTH,
                    events.as_mut_ptr(),
                    0usize,
                )
            };
            match usize::try_from(count) {
                Ok(count) => {
                    self.under_way -= count;
                    return Ok(events[..count]
                        .iter()
                        .map(|event| (event.data as usize, event.result))
                        .collect());
                }
                _ if io::Error::last_os_error().kind() == io::ErrorKind::Interrupted => {}
                _ => return Err(io::Error::last_os_error()),
            }
        }
    }
}

impl Drop for Call<'_> {
    fn drop(&mut self) {
        if let Some(context) = self.context.take().filter(|_| self.under_way == 0) {
            self.queue.give_back(context);
        }
    }
}

#[cfg(all(test, not(miri)))] // it knows none of these calls
mod tests {
    use super::*;
    use std::fs::File;
    use std::os::fd::AsRawFd;
    use std::panic::{AssertUnwindSafe, catch_unwind};

    /// `None` on a machine that has no such thing.
    fn queue() -> Option<Queue> {
        match Queue::new() {
            Ok(queue) => Some(queue),
            Err(error) => {
                let number = error.raw_os_error();
                assert!(matches!(number, Some(libc::ENOSYS | libc::EPERM)), "{error}");
                eprintln!("not run: {error}");
                None
            }
        }
    }

    /// A file without a name.
    fn file(content: &[u8]) -> File {
        use std::sync::atomic::{AtomicUsize, Ordering};

        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("page_copies-queue-{}-{number}", std::process::id()));
        std::fs::write(&path, content).unwrap();
        let file = File::options().read(true).write(true).open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        file
    }

    fn content(bytes: usize) -> Vec<u8> {
        (0..bytes).map(|i| (i * 7 + i / 251) as u8).collect()
    }

    /// One body for each offset and size, one after the other in `memory`.
    fn bodies(memory: &mut [u8], places: &[(u64, usize)]) -> Vec<Body> {
        let mut start = memory.as_mut_ptr();
        assert!(places.iter().map(|&(_, bytes)| bytes).sum::<usize>() <= memory.len());
        places
            .iter()
            .map(|&(offset, bytes)| {
                let body = Body { start, bytes, offset };
                start = start.wrapping_add(bytes);
                body
            })
            .collect()
    }

    /// More than may be under way, together and apart, not in order, and of any size.
    fn places() -> Vec<(u64, usize)> {
        let mut places = Vec::new();
        let mut offset = 0;
        for at in 0..500 {
            let bytes = [1, 4096, 100_000, 8192, 3][at % 5];
            places.push((offset, bytes));
            offset += bytes as u64 + u64::from(at % 7 == 0);
        }
        places.push((offset, TOGETHER + 1));
        places.rotate_left(100);
        places
    }

    #[test]
    fn bodies_are_read_and_each_is_seen_when_it_is_there() {
        let Some(queue) = queue() else { return };
        let places = places();
        let content = content(places.iter().map(|&(offset, bytes)| offset as usize + bytes).max().unwrap());
        let file = file(&content);
        let mut memory = vec![0xEE; places.iter().map(|&(_, bytes)| bytes).sum::<usize>() + 1];
        let bodies = bodies(&mut memory, &places);
        let mut seen = vec![0; bodies.len()];
        let mut show = |at: usize| {
            seen[at] += 1;
            let Body { start, bytes, offset } = bodies[at];
            // SAFETY: it is within `memory`, and was read.
            let body = unsafe { std::slice::from_raw_parts(start, bytes) };
            assert!(body == &content[offset as usize..][..bytes], "{at}");
        };
        // SAFETY: the bodies are parts of `memory`, one after the other.
        let moved = unsafe { queue.transfer(file.as_raw_fd(), Way::Read, &bodies, Some(&mut show)) };
        assert_eq!(moved, vec![true; places.len()]);
        assert_eq!(seen, vec![1; places.len()]);
        assert_eq!(memory.last(), Some(&0xEE));
    }

    #[test]
    fn bodies_are_written_and_each_is_seen() {
        let Some(queue) = queue() else { return };
        let places = places();
        let end = places.iter().map(|&(offset, bytes)| offset as usize + bytes).max().unwrap();
        let before = vec![0x11; end + 5];
        let file = file(&before);
        let mut memory = content(places.iter().map(|&(_, bytes)| bytes).sum());
        let mut expected = before;
        let mut from = 0;
        for &(offset, bytes) in &places {
            expected[offset as usize..][..bytes].copy_from_slice(&memory[from..from + bytes]);
            from += bytes;
        }
        let bodies = bodies(&mut memory, &places);
        let mut seen = vec![0; bodies.len()];
        // SAFETY: the bodies are parts of `memory`, one after the other.
        let moved =
            unsafe { queue.transfer(file.as_raw_fd(), Way::Write, &bodies, Some(&mut |at| seen[at] += 1)) };
        assert_eq!(moved, vec![true; places.len()]);
        assert_eq!(seen, vec![1; places.len()]);
        let mut after = vec![0; expected.len()];
        std::os::unix::fs::FileExt::read_exact_at(&file, &mut after, 0).unwrap();
        assert!(after == expected);
    }

    #[test]
    fn what_is_not_all_there_was_not_moved() {
        let Some(queue) = queue() else { return };
        let file = file(&content(10_000));
        let mut memory = vec![0; 10_000];
        // The last two are one request, and go beyond the end; the one before is beyond it.
        let bodies = bodies(&mut memory, &[(100, 900), (20_000, 10), (9000, 999), (9999, 2)]);
        let mut seen = Vec::new();
        // SAFETY: the bodies are parts of `memory`, one after the other.
        let moved =
            unsafe { queue.transfer(file.as_raw_fd(), Way::Read, &bodies, Some(&mut |at| seen.push(at))) };
        assert_eq!(moved, [true, false, false, false]);
        assert_eq!(seen, [0]);
    }

    #[test]
    fn what_the_kernel_refuses_was_not_moved() {
        let Some(queue) = queue() else { return };
        let mut memory = vec![0; 4096];
        let bodies = bodies(&mut memory, &[(0, 4096)]);
        let only_read = File::open("/dev/zero").unwrap();
        for (file, way) in [(-1, Way::Read), (-1, Way::Write), (only_read.as_raw_fd(), Way::Write)] {
            // SAFETY: the body is `memory`.
            let moved = unsafe { queue.transfer(file, way, &bodies, None) };
            assert_eq!(moved, [false], "{file} {way:?}");
        }
        // SAFETY: there is no body.
        assert!(unsafe { queue.transfer(-1, Way::Read, &[], Some(&mut |_| panic!("of what?"))) }.is_empty());
    }

    #[test]
    fn the_next_call_gets_only_its_own_after_one_that_panicked() {
        let Some(queue) = queue() else { return };
        let content = content(1 << 20);
        let file = file(&content);
        let places: Vec<(u64, usize)> = (0..64).map(|at| (at * 8000, 4000)).collect();
        let mut memory = vec![0; 64 * 4000];
        let bodies = bodies(&mut memory, &places);
        let failed = catch_unwind(AssertUnwindSafe(|| {
            // SAFETY: the bodies are parts of `memory`, one after the other.
            unsafe { queue.transfer(file.as_raw_fd(), Way::Read, &bodies, Some(&mut |at| assert_ne!(at, 3))) }
        }));
        assert!(failed.is_err());
        let mut count = 0;
        // SAFETY: as above.
        let moved =
            unsafe { queue.transfer(file.as_raw_fd(), Way::Read, &bodies[..5], Some(&mut |_| count += 1)) };
        assert_eq!((moved, count), (vec![true; 5], 5));
    }

    #[test]
    fn calls_at_the_same_time() {
        let Some(queue) = queue() else { return };
        let content = content(1 << 20);
        let file = file(&content);
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let (queue, file, content) = (&queue, &file, &content);
                scope.spawn(move || {
                    let places: Vec<(u64, usize)> = (0..50).map(|at| (at * 20_000 + thread, 4096)).collect();
                    for _ in 0..20 {
                        let mut memory = vec![0; 50 * 4096];
                        let bodies = bodies(&mut memory, &places);
                        // SAFETY: the bodies are parts of `memory`, one after the other.
                        let moved = unsafe { queue.transfer(file.as_raw_fd(), Way::Read, &bodies, None) };
                        assert_eq!(moved, vec![true; 50]);
                        for (&(offset, bytes), part) in places.iter().zip(memory.chunks(4096)) {
                            assert!(part == &content[offset as usize..][..bytes]);
                        }
                    }
                });
            }
        });
    }

    #[test]
    fn as_much_is_under_way_as_seen_leaves_time_for() {
        let mib = 1 << 20;
        // As fast as the disk: half, while `seen` is at the other half.
        assert_eq!(depth(64, mib, SAME_PACE), 32);
        assert_eq!(depth(64, mib, SAME_PACE / 3), 48);
        // At the end as much as keeps the disk busy, and never one alone.
        assert_eq!(depth(3, mib / 4, SAME_PACE), 4);
        assert_eq!(depth(1, 4 * mib, SAME_PACE), 2);
        assert_eq!(depth(0, 0, SAME_PACE), DEPTH);
        assert_eq!(depth(5000, mib, PACES.0), DEPTH);
    }

    #[test]
    fn a_pace_is_learned_in_a_few_calls_whatever_one_of_them_says() {
        let after = |calls: usize, from: usize, seen: u64, disk: u64| {
            (0..calls)
                .fold(from, |pace, _| learned(pace, Duration::from_micros(seen), Duration::from_micros(disk)))
        };
        assert!(after(1, FIRST_PACE, 100, 1000).abs_diff(FIRST_PACE) < FIRST_PACE / 4);
        assert!(after(20, FIRST_PACE, 100, 1000).abs_diff(SAME_PACE / 10) < SAME_PACE / 100);
        assert!(after(20, PACES.0, 500, 1000).abs_diff(SAME_PACE / 2) < SAME_PACE / 100);
        for (seen, disk) in [(0, 1000), (1000, 0), (0, 0), (u64::MAX / 1_000_000, 1)] {
            assert!((PACES.0..=PACES.1).contains(&after(100, FIRST_PACE, seen, disk)), "{seen} {disk}");
        }
    }

    #[test]
    fn a_few_bodies_that_are_larger_than_what_keeps_a_disk_busy() {
        const BYTES: usize = 4 * BUSY;
        let Some(queue) = queue() else { return };
        let file = file(&content(5 * BYTES));
        let mut memory = vec![0; 5 * BYTES];
        for count in 1..=5 {
            for pace in [PACES.0, PACES.1] {
                let places: Vec<(u64, usize)> = (0..count).map(|at| ((at * BYTES) as u64, BYTES)).collect();
                let bodies = bodies(&mut memory, &places);
                queue.pace.store(pace, Ordering::Relaxed);
                let mut seen = vec![0; count];
                let mut show = |at: usize| seen[at] += 1;
                // SAFETY: the bodies are parts of `memory`, one after the other.
                let moved = unsafe { queue.transfer(file.as_raw_fd(), Way::Read, &bodies, Some(&mut show)) };
                assert_eq!(moved, vec![true; count]);
                assert_eq!(seen, vec![1; count]);
            }
        }
    }

    #[test]
    fn a_read_that_is_shown_is_learned_from() {
        let Some(queue) = queue() else { return };
        let content = content(PACE_BYTES);
        let file = file(&content);
        let places: Vec<(u64, usize)> = (0..64).map(|at| (at << 16, PACE_BYTES / 64)).collect();
        let mut memory = vec![0; PACE_BYTES];
        let bodies = bodies(&mut memory, &places);
        let transfer = |way, bodies: &[Body], seen: Option<&mut dyn FnMut(usize)>| {
            // SAFETY: the bodies are parts of `memory`, one after the other.
            unsafe { queue.transfer(file.as_raw_fd(), way, bodies, seen) };
            queue.pace.load(Ordering::Relaxed)
        };
        assert_eq!(transfer(Way::Read, &bodies, None), FIRST_PACE);
        assert_eq!(transfer(Way::Write, &bodies, Some(&mut |_| {})), FIRST_PACE);
        assert_eq!(transfer(Way::Read, &bodies[1..], Some(&mut |_| {})), FIRST_PACE);
        // One that is refused, or ends too early, was not a read.
        let seen = &mut |_| {};
        // SAFETY: as above.
        unsafe { queue.transfer(-1, Way::Read, &bodies, Some(seen)) };
        assert_eq!(queue.pace.load(Ordering::Relaxed), FIRST_PACE);
        let mut late = bodies.clone();
        late[63].offset += 1;
        assert_eq!(transfer(Way::Read, &late, Some(&mut |_| {})), FIRST_PACE);
        // Hardly anything was done with it.
        assert!(transfer(Way::Read, &bodies, Some(&mut |_| {})) < FIRST_PACE);
    }

    #[test]
    fn neighbours_are_asked_for_together() {
        let at = |places: &[(u64, usize)]| {
            let bodies: Vec<Body> = places
                .iter()
                .map(|&(offset, bytes)| Body { start: std::ptr::null_mut(), bytes, offset })
                .collect();
            groups(&bodies)
        };
        assert_eq!(at(&[]), []);
        assert_eq!(at(&[(0, 10), (10, 5), (15, 1), (17, 1), (0, 1)]), [0..3, 3..4, 4..5]);
        assert_eq!(
            at(&[(0, TOGETHER / 2), (TOGETHER as u64 / 2, TOGETHER / 2), (TOGETHER as u64, 1)]),
            [0..2, 2..3]
        );
        assert_eq!(at(&[(0, TOGETHER + 7), (TOGETHER as u64 + 7, 1)]), [0..1, 1..2]);
        assert_eq!(at(&[(u64::MAX, 2), (1, 1)]), [0..1, 1..2]);
        let many: Vec<(u64, usize)> = (0..600).map(|at| (at, 1)).collect();
        assert_eq!(at(&many), [0..256, 256..512, 512..600]);
    }
}
