//! The stored tree against an obvious model: a list of the prefixes that are known, page by page.

use super::*;
use crate::tokens::Tokens;

fn digests(tokens: &[u32]) -> Vec<Digest> {
    crate::page_hashes(Tokens::U32(tokens), 1, None, Namespace::default(), false).unwrap()
}

fn add(tree: &mut StoredTree, tokens: &[u32]) -> Added {
    tree.add(None, Namespace::default(), &digests(tokens), None)
}

fn known(tree: &StoredTree, tokens: &[u32]) -> usize {
    tree.known(&digests(tokens))
}

#[test]
fn a_node_for_each_run_that_was_stored() {
    let mut tree = StoredTree::new(1, 100).unwrap();
    assert_eq!(add(&mut tree, &[1, 2, 3, 4]), Added { pages: 4, orphans: 0 });
    assert_eq!(add(&mut tree, &[1, 2, 5]), Added { pages: 1, orphans: 0 });
    assert_eq!(add(&mut tree, &[1, 2]), Added::default());
    assert_eq!((tree.len(), tree.pages()), (3, 5)); // [1 2], [3 4], [5]
    assert_eq!(known(&tree, &[1, 2, 5, 6]), 3);
    assert_eq!(known(&tree, &[2, 5]), 0);
    // Below a page, without what is before.
    let below = digests(&[1, 2, 5, 8]);
    assert_eq!(tree.add(Some(&below[2]), Namespace::default(), &below[3..], None).pages, 1);
    let nowhere = digests(&[9, 9]);
    assert_eq!(tree.add(Some(&nowhere[0]), Namespace::default(), &nowhere[1..], None).orphans, 1);
    tree.check_invariants().unwrap();
}

#[test]
fn what_was_used_longest_ago_goes_first() {
    let mut tree = StoredTree::new(1, 6).unwrap();
    add(&mut tree, &[1, 2, 3]);
    add(&mut tree, &[4, 5]);
    tree.touch(&digests(&[1, 2]));
    add(&mut tree, &[6, 7]);
    assert_eq!([&[1, 2, 3][..], &[4, 5], &[6, 7]].map(|tokens| known(&tree, tokens)), [3, 0, 2]);
    // Never an inner node before what hangs below it.
    add(&mut tree, &[1, 2, 3, 4]);
    add(&mut tree, &[8]);
    assert_eq!((known(&tree, &[1, 2, 3, 4]), known(&tree, &[6, 7])), (4, 0));
    add(&mut tree, &[9, 9, 9, 9, 9, 9, 9]);
    assert_eq!((known(&tree, &[9, 9, 9, 9, 9, 9, 9]), tree.len()), (6, 1));
    tree.check_invariants().unwrap();
}

#[test]
fn the_latest_prefixes_with_their_tokens() {
    let mut tree = StoredTree::new(1, 100).unwrap();
    let source = |at| Some(Source { piece: 7, at });
    let plain = Namespace::default();
    tree.add(None, plain, &digests(&[1, 2, 3]), source(100));
    tree.add(None, plain, &digests(&[1, 2, 4, 5]), source(200));
    tree.add(None, plain, &digests(&[8]), None);
    let all: Vec<_> = tree.recent(100).into_iter().map(|prefix| prefix.runs).collect();
    let run = |node, pages, at| Run { node, pages, source: Source { piece: 7, at } };
    assert_eq!(all, [vec![run(0, 2, 100), run(2, 2, 208)], vec![run(0, 2, 100), run(1, 1, 108)]]);
    let some: Vec<_> = tree.recent(3).into_iter().map(|prefix| prefix.runs).collect();
    assert_eq!(some, [vec![run(0, 2, 100), run(2, 1, 208)]]);
    assert_eq!(tree.recent(1)[0].runs, [run(0, 1, 100)]);
}

/// xorshift, so that a failure can be played again.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 16) % limit
    }

    fn tokens(&mut self) -> Vec<u32> {
        (0..=self.below(8)).map(|_| self.below(3) as u32).collect()
    }
}

#[test]
fn random_calls_do_what_the_model_says() {
    for seed in 1..400 {
        let mut random = Random((seed + 1) << 17 | 1);
        let mut tree = StoredTree::new(1, 10_000).unwrap();
        let mut model: BTreeSet<Vec<u32>> = BTreeSet::new();
        for _ in 0..60 {
            let tokens = random.tokens();
            let pages = digests(&tokens);
            match random.below(4) {
                0 | 1 => {
                    let from = random.below(tokens.len() as u64) as usize;
                    let parent = from.checked_sub(1).map(|before| &pages[before]);
                    let fits = from == 0 || model.contains(&tokens[..from]);
                    let new = (from..tokens.len()).filter(|&page| !model.contains(&tokens[..=page])).count();
                    let done = tree.add(parent, Namespace::default(), &pages[from..], None);
                    if fits {
                        assert_eq!(done, Added { pages: new, orphans: 0 }, "seed {seed}");
                        model.extend((from..tokens.len()).map(|page| tokens[..=page].to_vec()));
                    } else {
                        assert_eq!(done, Added { pages: 0, orphans: tokens.len() - from }, "seed {seed}");
                    }
                }
                2 => {
                    let before = model.len();
                    if random.below(3) == 0 {
                        model.retain(|prefix| !prefix.starts_with(&tokens));
                        assert_eq!(tree.forget(pages.last().unwrap()), before - model.len(), "seed {seed}");
                    }
                }
                _ => {
                    let there =
                        (0..tokens.len()).take_while(|&page| model.contains(&tokens[..=page])).count();
                    assert_eq!(tree.touch(&pages), there, "seed {seed}");
                }
            }
            assert_eq!(tree.pages(), model.len());
        }
        tree.check_invariants().unwrap();
        // With less room the same calls keep a part of it, and nothing else.
        let mut small = StoredTree::new(1, 1 + random.below(12) as usize).unwrap();
        for prefix in &model {
            add(&mut small, prefix);
            small.check_invariants().unwrap();
            assert!(known(&small, prefix) > 0 || prefix.len() > 1);
        }
    }
}

#[test]
fn a_log_is_loaded_as_far_as_its_pages_are_there() {
    let space = Space { fingerprint: *b"0123456789abcdef", first_group: 0 };
    let record = |tokens: &[u32], parent| {
        let tokens = Tokens::U32(tokens);
        Record { space, page_size: 1, parent, namespace: Namespace::default(), tokens }.to_bytes().unwrap()
    };
    let chain = digests(&[1, 2, 3, 4]);
    let log = [record(&[1, 2], None), record(&[3], Some(chain[1])), record(&[4], Some(chain[2]))].concat();
    let part = LogPart::read(&log, Some(space.fingerprint), Some(0), 1, true);
    let mut tree = StoredTree::new(1, 100).unwrap();
    assert_eq!(tree.load(&part, 0, &[true; 4]).unwrap(), Added { pages: 4, orphans: 0 });
    assert_eq!((tree.len(), known(&tree, &[1, 2, 3, 4])), (3, 4));
    let all = tree.all();
    assert_eq!(
        all.iter().map(|node| node.parent).collect::<Vec<_>>(),
        [None, Some(chain[1]), Some(chain[2])]
    );
    let mut tree = StoredTree::new(1, 100).unwrap();
    let held = [true, false, true, true];
    assert_eq!(tree.load(&part, 0, &held).unwrap(), Added { pages: 1, orphans: 2 });
    assert!(tree.load(&part, 0, &held[1..]).is_err());
}
