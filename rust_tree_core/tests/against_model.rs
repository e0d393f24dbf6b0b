//! Random scripts of calls: after each one the production tree must agree with the obvious model.
//!
//! `UNIFIED_CACHE_MODEL_CALLS` sets the calls for each policy (default 200,000),
//! `UNIFIED_CACHE_MODEL_SEED` where the seeds begin (default 0). A failure prints its seed and a
//! short script that can be pasted into `model/regressions.rs`.

mod model;

use model::failure::Failure;
use model::random::Random;
use model::script::{Call, Config, generate};
use model::tokens::positions;
use model::tree::page_digests;
use model::{driver, regressions, shrink};

const CALLS_A_SCRIPT: usize = 200;

fn setting(name: &str, default: u64) -> u64 {
    let given = std::env::var(name).ok();
    given.map_or(default, |given| {
        let number = given.replace('_', "").parse();
        number.unwrap_or_else(|_| panic!("{name} must be a whole number, not {given}"))
    })
}

fn play_policy(policy: &'static str) {
    let calls = setting("UNIFIED_CACHE_MODEL_CALLS", 200_000);
    let first_seed = setting("UNIFIED_CACHE_MODEL_SEED", 0);
    let mut played = 0;
    let mut seed = first_seed;
    while played < calls {
        let mut random = Random::new(seed);
        let config = Config::random(&mut random, policy);
        let script = generate(seed, CALLS_A_SCRIPT, &config);
        // Some scripts are played twice: two trees that see the same calls hold the same tree.
        let result = if seed.is_multiple_of(8) {
            driver::run_twice(&script, &config)
        } else {
            driver::run(&script, &config)
        };
        if let Err(failure) = result {
            explain(policy, seed, &config, &script, &failure);
        }
        played += CALLS_A_SCRIPT as u64;
        seed += 1;
    }
}

fn explain(policy: &str, seed: u64, config: &Config, script: &[Call], failure: &Failure) -> ! {
    let (calls, short_failure) = shrink::shrink(script, config);
    let first = &failure.message;
    let short = &short_failure.message;
    let at = short_failure.at;
    let source = shrink::as_source(config, &calls);
    panic!("policy {policy}, seed {seed}: {first}\n\nmade short, fails at call {at}: {short}\n\n{source}\n");
}

macro_rules! policies {
    ($($policy:ident),*) => {
        $(
            #[test]
            fn $policy() {
                play_policy(stringify!($policy));
            }
        )*

        #[test]
        fn every_policy_has_a_test() {
            let mut tested = vec![$(stringify!($policy)),*];
            let mut registered = rust_tree_core::policy_names();
            tested.sort_unstable();
            registered.sort_unstable();
            assert_eq!(tested, registered);
        }
    };
}

policies!(lru, lfu, fifo, mru, filo, priority, slru, tlru);

#[test]
fn regressions_stay_fixed() {
    for regression in regressions::regressions() {
        if let Err(failure) = driver::run_twice(&regression.calls, &regression.config) {
            let at = failure.at;
            panic!("{}: call {at}: {}", regression.name, failure.message);
        }
    }
}

/// Published digests of the last page of `0, 1, 2, ...` in pages of four, so that the model is not
/// just wrong in the same way.
#[test]
fn the_model_hashes_as_published() {
    let name = |name: &str| Some(name.to_string());
    let vectors = [
        (12, (None, None), false, "fd5bd05ab69776768cb177e87c5ef6f8f8dec410a03a3c238a58a89c01ba803c"),
        (
            8,
            (name("ab"), name("c")),
            false,
            "3c3ba6f76ae6972ac8f1bb4968c27f51a8b597981f84438e1f3536c37b612ac8",
        ),
        (
            8,
            (name("a"), name("bc")),
            false,
            "ccd267d9bc78038eddc2c72d76fb376e02eb296e8cec6e0e4a01e9799b820010",
        ),
        (8, (name(""), None), false, "ac03d860e865b706352ff00e944cd18c06024f42fd580b91c98bce7dfd7668b4"),
        (9, (None, None), true, "54ec4f852ead617d9c01055b7978c427d2ff6aa1b44a1613047281d344eb0628"),
    ];
    for (tokens, names, bigram, published) in vectors {
        let raw: Vec<u32> = (0..tokens).collect();
        let key = positions(&raw, bigram);
        let digests = page_digests(&key, 4, &names);
        let hex: Vec<String> = digests[digests.len() - 1].iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(hex.concat(), published);
    }
}
