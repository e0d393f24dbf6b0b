//! A value that is used by one caller at a time and is refused after a call panicked halfway.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, TryLockError};

/// Why a guarded value was not used to the end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GuardError {
    /// This call panicked, with this message; the value may be half-changed.
    Panicked(String),
    /// An earlier call panicked; only `renew` helps.
    Poisoned,
}

/// Holds a value of which no half-changed state is ever seen.
#[derive(Debug)]
pub struct Guarded<T> {
    value: Mutex<T>,
}

impl<T> Guarded<T> {
    /// Guards a value.
    pub fn new(value: T) -> Self {
        Self { value: Mutex::new(value) }
    }

    /// Runs a call on the value; `None` if another thread is in one just now.
    pub fn try_run<R>(&self, call: impl FnOnce(&mut T) -> R) -> Option<Result<R, GuardError>> {
        match self.value.try_lock() {
            Err(TryLockError::WouldBlock) => None,
            Err(TryLockError::Poisoned(_)) => Some(Err(GuardError::Poisoned)),
            // The lock is dropped inside, while a panic unwinds: that is what poisons it.
            Ok(mut value) => Some(caught(move || call(&mut value))),
        }
    }

    /// Runs a call on the value, after waiting for other threads.
    pub fn run<R>(&self, call: impl FnOnce(&mut T) -> R) -> Result<R, GuardError> {
        match self.value.lock() {
            Err(_) => Err(GuardError::Poisoned),
            Ok(mut value) => caught(move || call(&mut value)),
        }
    }

    /// Runs a call that makes the value whole again, whatever state it is in.
    pub fn renew<R>(&self, call: impl FnOnce(&mut T) -> R) -> Result<R, GuardError> {
        self.value.clear_poison();
        self.run(call)
    }
}

fn caught<R>(call: impl FnOnce() -> R) -> Result<R, GuardError> {
    // Unwind safety: the lock is poisoned by the panic, so nobody looks at what was half done.
    catch_unwind(AssertUnwindSafe(call)).map_err(|panic| GuardError::Panicked(message(panic.as_ref())))
}

fn message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("panic without message").to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_half_changed_value_is_never_seen() {
        let guarded = Guarded::new(vec![1, 2]);
        let failed = guarded.run(|value| {
            value.clear();
            assert!(value.len() == 2, "lost {}", 2);
        });
        assert_eq!(failed, Err(GuardError::Panicked("lost 2".to_owned())));
        assert_eq!(guarded.run(|value| value.len()), Err(GuardError::Poisoned));
        assert_eq!(guarded.try_run(|value| value.len()), Some(Err(GuardError::Poisoned)));
        assert_eq!(guarded.renew(|value| *value = vec![7]), Ok(()));
        assert_eq!(guarded.run(|value| value[0]), Ok(7));
    }

    #[test]
    fn a_panic_in_try_run_poisons_too() {
        let guarded = Guarded::new(1);
        assert!(matches!(guarded.try_run(|_| panic!("no")), Some(Err::<(), _>(GuardError::Panicked(_)))));
        assert_eq!(guarded.run(|value| *value), Err(GuardError::Poisoned));
    }

    #[test]
    fn one_caller_at_a_time() {
        let guarded = Guarded::new(1);
        let inner = guarded.run(|_| guarded.try_run(|value| *value));
        assert_eq!(inner, Ok(None));
        assert_eq!(guarded.try_run(|value| *value), Some(Ok(1)));
    }
}
