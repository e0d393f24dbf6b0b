//! Makes a failing script short: delta debugging on the list of calls, then on each call.

use super::driver;
use super::failure::Failure;
use super::script::{Call, Config};
use super::tokens::Key;

/// Enough for scripts of some hundred calls; a bound, so that a failing test ends.
const MOST_RUNS: usize = 6_000;

struct Shrinking<'a> {
    config: &'a Config,
    runs: usize,
}

impl Shrinking<'_> {
    fn fails(&mut self, calls: &[Call]) -> bool {
        self.runs += 1;
        self.runs <= MOST_RUNS && driver::run(calls, self.config).is_err()
    }

    /// Leaves out runs of calls, from half of the script down to single calls.
    fn fewer_calls(&mut self, mut calls: Vec<Call>) -> Vec<Call> {
        let mut length = calls.len().div_ceil(2);
        loop {
            let before = calls.len();
            let mut at = 0;
            while at < calls.len() {
                let mut fewer = calls.clone();
                fewer.drain(at..(at + length).min(calls.len()));
                if self.fails(&fewer) {
                    calls = fewer;
                } else {
                    at += length;
                }
            }
            if length > 1 {
                length = length.div_ceil(2);
            } else if calls.len() == before {
                return calls;
            }
        }
    }

    fn simpler_calls(&mut self, mut calls: Vec<Call>) -> Vec<Call> {
        for at in 0..calls.len() {
            let mut step = 0;
            loop {
                let candidates = simpler(&calls[at]);
                let Some(candidate) = candidates.into_iter().nth(step) else {
                    break;
                };
                let mut changed = calls.clone();
                changed[at] = candidate;
                if changed != calls && self.fails(&changed) {
                    calls = changed;
                    step = 0;
                } else {
                    step += 1;
                }
            }
        }
        calls
    }
}

/// A shorter script that fails too, and how.
pub fn shrink(calls: &[Call], config: &Config) -> (Vec<Call>, Failure) {
    let mut shrinking = Shrinking { config, runs: 0 };
    let mut calls = calls.to_vec();
    if let Err(failure) = driver::run(&calls, config) {
        calls.truncate(failure.at + 1);
    }
    calls = shrinking.fewer_calls(calls);
    calls = shrinking.simpler_calls(calls);
    calls = shrinking.fewer_calls(calls);
    let failure = driver::run(&calls, config).err().unwrap_or_else(|| {
        let message = "fails in some runs only".to_string();
        Failure { at: 0, message }
    });
    (calls, failure)
}

fn simpler(call: &Call) -> Vec<Call> {
    let mut out = Vec::new();
    let mut with = |change: &dyn Fn(&mut Call)| {
        let mut changed = call.clone();
        change(&mut changed);
        if changed != *call {
            out.push(changed);
        }
    };
    with(&|call| {
        if let Call::Insert { own, inserted, priority, chunked, .. } = call {
            (*own, *inserted, *priority, *chunked) = (0, 0, 0, false);
        }
    });
    with(&|call| {
        if let Call::Insert { prev, lent, .. } = call {
            (*prev, *lent) = (0, true);
        }
    });
    with(&|call| {
        if let Call::InsertHost { names, hashes, .. } = call {
            (*names, *hashes) = (0, false);
        }
    });
    with(&|call| {
        if let Call::InsertHost { toward, .. } = call {
            *toward = None;
        }
    });
    for which in 0..keys(&mut call.clone()).len() {
        let pages = keys(&mut call.clone())[which].pages.len();
        with(&|call| *keys(call)[which] = Key::default());
        for page in (0..pages).rev() {
            with(&|call| {
                keys(call)[which].pages.remove(page);
            });
            with(&|call| keys(call)[which].pages[page] = 0);
        }
        with(&|call| keys(call)[which].ns = 0);
        with(&|call| keys(call)[which].tail = 0);
        with(&|call| keys(call)[which].form = 0);
        with(&|call| keys(call)[which].bad = None);
    }
    out
}

fn keys(call: &mut Call) -> Vec<&mut Key> {
    match call {
        Call::Match { key, .. }
        | Call::Peek { key, .. }
        | Call::Insert { key, .. }
        | Call::InsertHost { key, .. } => vec![key],
        Call::MatchMany { keys } => keys.iter_mut().collect(),
        _ => Vec::new(),
    }
}

/// The script as an entry of `regressions.rs`.
pub fn as_source(config: &Config, calls: &[Call]) -> String {
    let mut lines = vec!["Regression {".to_string(), "    name: \"\",".to_string()];
    lines.push(format!("    config: {},", literal(&format!("{config:?}"))));
    lines.push("    calls: vec![".to_string());
    for call in calls {
        lines.push(format!("        Call::{},", literal(&format!("{call:?}"))));
    }
    lines.push("    ],".to_string());
    lines.push("},".to_string());
    lines.join("\n")
}

/// Debug output of our plain data is Rust, but for lists and the paths of enums.
fn literal(debug: &str) -> String {
    debug
        .replace('[', "vec![")
        .replace("source: ", "source: Source::")
        .replace("Some(Write", "Some(WritePolicy::Write")
        .replace("host_order: ", "host_order: HostOrder::")
}
