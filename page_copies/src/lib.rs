//! Copies of KV pages between two pools in CPU memory, whatever their layouts.
//!
//! A pool is, for each (layer, part), a *plane*: an address, and strides from page to page, token to token and head to
//! head that all its planes share ([`Geometry`]). A *run*, one head of one token, is contiguous everywhere. All
//! layouts are of this form, so there is one copy, which looks for what both sides have in common ([`PageCopy`]).
//!
//! Bytes that are contiguous on both sides go by [`copy`], or by [`copy_summed`], which makes their checksum on the way.
//! Of stored objects there are also their [`Header`], [`read_object`], which reads one from a file of its own, a
//! [`Queue`], by which a file's bodies are read and written many at a time, and [`Slots`], which knows where in it they are.
//!
//! The crate knows neither Python nor the tree. Everything that can be wrong is found before a byte moves.

#![cfg_attr(not(test), warn(missing_docs))]

mod copy;
mod error;
mod file;
mod geometry;
mod header;
mod planes;
mod queue;
mod route;
mod seen;
mod slots;
mod stores;
mod sums;
#[cfg(all(target_arch = "x86_64", not(miri)))]
mod xxh3;

pub use copy::PageCopy;
pub use error::Error;
pub use file::{Place, read_object};
pub use geometry::Geometry;
pub use header::{COVERED, HEADER_BYTES, Header, MOST_KEY_BYTES};
pub use planes::Planes;
pub use queue::{Body, Queue, Way};
pub use seen::copy;
pub use slots::{KEY_WORDS, Located, Misfit, Shared, Slots, Stored, Sums, read_table};
pub use sums::{checksum, copy_summed};
