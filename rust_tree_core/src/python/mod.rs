//! The Python face: converts arguments and results, and decides nothing.
//!
//! `buffers` reads what callers pass, `results` is what they get back, this file has the tree's calls, `replay` those
//! of the replay, `copies` those of crate `page_copies`, `checksum`, `objects` and
//! `stored` those of stored pages.

#![allow(clippy::needless_pass_by_value)] // PyO3 hands arguments over by value

mod buffers;
mod checksum;
mod copies;
mod errors;
mod io_queue;
mod objects;
mod replay;
mod results;
mod stored;

use pyo3::prelude::*;
use pyo3::pybacked::PyBackedStr;
use pyo3::types::{PyMapping, PyString};

use crate::{
    AckKind, GuardError, Guarded, HostOrder, InsertArgs, InsertHostArgs, Namespace, NodeId, Tree, TreeConfig,
    WritePolicy, policy_names,
};
use buffers::{NodeArg, NodeList, Whole, Words, digests, page_ids, text, time};
use errors::{argument_error, lock_error, poisoned_error, tree_error};
use results::{
    Ack, BackupDone, BackupPlan, Evicted, HostEvicted, HostInserted, HostLockReceipt, Inserted, LoadBackPlan,
    LockReceipt, Match, NodeInfo, Pin, digest_array, event_object, page_array,
};

/// Work from which a call lets other Python threads run: about 200 µs of it. Below that, waiting for the
/// interpreter's lock again can cost more than the call.
const LONG_TOKENS: usize = 1 << 20;
const LONG_HASHES: usize = 1 << 16;
const LONG_PAGES: usize = 2_000;
const LONG_NODES: usize = 500;
const LONG_LOAD_NODES: usize = 4_000;

/// Most keys in one waiting queue.
const MAX_QUEUE: usize = 1 << 20;

type TreeResult<T> = std::result::Result<T, crate::Error>;

#[pyclass(frozen, module = "unified_cache")]
struct PrefixTree {
    tree: Guarded<Tree>,
    /// Tokens from which an insert is a long call: with events on, its pages are hashed at once.
    long_insert: usize,
}

impl PrefixTree {
    /// Runs a call on the tree; a long one without the interpreter's lock.
    fn run<R: Send>(
        &self,
        py: Python<'_>,
        long: bool,
        call: impl FnOnce(&mut Tree) -> R + Send,
    ) -> PyResult<R> {
        let done = if long {
            py.detach(|| self.tree.run(call))
        } else {
            let mut call = Some(call);
            let tried = self.tree.try_run(|tree| call.take().map(|call| call(tree)));
            match (tried, call) {
                (Some(done), _) => done.map(|result| result.expect("the call was there")),
                // Another thread is in a long call: wait for it without the interpreter's lock.
                (None, Some(call)) => py.detach(|| self.tree.run(call)),
                (None, None) => unreachable!("a call that was not tried was not taken"),
            }
        };
        done.map_err(|error| guard_error(py, &error))
    }

    /// The same for calls that can fail.
    fn try_run<R: Send>(
        &self,
        py: Python<'_>,
        long: bool,
        call: impl FnOnce(&mut Tree) -> TreeResult<R> + Send,
    ) -> PyResult<R> {
        self.run(py, long, call)?.map_err(|error| tree_error(py, error))
    }

    /// The same for calls that end a copy, which is as long as the copy has nodes.
    fn end_copy<R: Send>(
        &self,
        py: Python<'_>,
        ack: crate::Ack,
        call: impl FnOnce(&mut Tree) -> TreeResult<R> + Send,
    ) -> PyResult<R> {
        let nodes = self.number(py, |tree| tree.nodes_of(ack))?;
        let long = match ack.kind() {
            AckKind::Backup => LONG_NODES,
            AckKind::LoadBack => LONG_LOAD_NODES,
        };
        self.try_run(py, nodes >= long, call)
    }

    fn number<R: Send>(&self, py: Python<'_>, read: impl FnOnce(&Tree) -> R + Send) -> PyResult<R> {
        self.run(py, false, |tree| read(tree))
    }
}

fn guard_error(py: Python<'_>, error: &GuardError) -> PyErr {
    match error {
        GuardError::Panicked(text) => poisoned_error(
            py,
            format!(
                "internal error in the tree: {text}; it is refused from now on, reset() makes it usable again"
            ),
        ),
        GuardError::Poisoned => poisoned_error(
            py,
            "an earlier call failed inside; reset() makes the tree usable again".to_owned(),
        ),
    }
}

/// The parts of a namespace, as they were given.
struct Space(Option<PyBackedStr>, Option<PyBackedStr>);

impl Space {
    fn of(extra_key: Option<&Bound<'_, PyAny>>, cache_salt: Option<&Bound<'_, PyAny>>) -> PyResult<Self> {
        Ok(Self(text(extra_key, "extra_key")?, text(cache_salt, "cache_salt")?))
    }

    fn get(&self) -> Namespace<'_> {
        Namespace { extra_key: self.0.as_deref(), cache_salt: self.1.as_deref() }
    }
}

/// The ack behind a Python object.
fn ack_of(ack: &Bound<'_, PyAny>) -> PyResult<crate::Ack> {
    match ack.cast::<Ack>() {
        Ok(ack) => Ok(ack.get().0),
        Err(_) => Err(lock_error(ack.py(), format!("ack is {}, not an ack of this tree", show(ack)))),
    }
}

/// The items of a sequence.
fn items<'py>(object: &Bound<'py, PyAny>, name: &str) -> PyResult<Vec<Bound<'py, PyAny>>> {
    let is_text = object.is_instance_of::<PyString>();
    match object.try_iter() {
        Ok(items) if !is_text && object.cast::<PyMapping>().is_err() => {
            let mut list = Vec::new();
            for item in items {
                list.push(item?);
                if list.len() > MAX_QUEUE {
                    let text = format!("{name} has more than {MAX_QUEUE} entries");
                    return Err(argument_error(object.py(), text));
                }
            }
            Ok(list)
        }
        _ => Err(argument_error(object.py(), format!("{name} is {}, a sequence is needed", show(object)))),
    }
}

/// A str (or None) for each of `count` keys.
fn texts(list: Option<&Bound<'_, PyAny>>, name: &str, count: usize) -> PyResult<Vec<Option<PyBackedStr>>> {
    let Some(object) = list else { return Ok((0..count).map(|_| None).collect()) };
    let list = items(object, name)?;
    if list.len() != count {
        return Err(argument_error(
            object.py(),
            format!("{name} has {} entries, keys has {count}", list.len()),
        ));
    }
    let parts = list.iter().enumerate();
    parts.map(|(at, part)| text((!part.is_none()).then_some(part), &format!("{name}[{at}]"))).collect()
}

/// The error for a receipt or plan that another thread is giving back just now.
fn in_use(py: Python<'_>, name: &str) -> PyErr {
    lock_error(py, format!("{name} is in use by another thread"))
}

/// A short text for messages.
fn show(object: &Bound<'_, PyAny>) -> String {
    let text = object.repr().map_or_else(|_| "?".to_owned(), |text| text.to_string());
    if text.chars().count() > 60 { format!("{}...", text.chars().take(57).collect::<String>()) } else { text }
}

fn policy_options(options: Option<&Bound<'_, PyAny>>) -> PyResult<Vec<(String, i64)>> {
    let Some(options) = options else { return Ok(Vec::new()) };
    let py = options.py();
    let Ok(mapping) = options.cast::<PyMapping>() else {
        return Err(argument_error(py, format!("policy_options is {}, a mapping is needed", show(options))));
    };
    let mut pairs = Vec::new();
    for pair in mapping.items()? {
        let (key, value): (Bound<'_, PyAny>, Whole) = pair.extract()?;
        let Ok(name) = key.extract::<String>() else {
            return Err(argument_error(
                py,
                format!("policy_options has key {}, a str is needed", show(&key)),
            ));
        };
        let number = value.exact(py, &format!("policy_options[{name:?}]"))?;
        pairs.push((name, number));
    }
    Ok(pairs)
}

#[pymethods]
impl PrefixTree {
    #[new]
    #[pyo3(
        signature = (page_size=Whole::Number(1), *, eviction_policy="lru", policy_options=None, write_policy=Some("write_through"),
                     write_through_threshold=None, bigram=false, events=false, event_capacity=Whole::Number(65_536), pin_capacity=None,
                     host_order="copies_first"),
        text_signature = "(page_size=1, *, eviction_policy='lru', policy_options=None, write_policy='write_through', \
                          write_through_threshold=None, bigram=False, events=False, event_capacity=65536, pin_capacity=None, \
                          host_order='copies_first')"
    )]
    #[allow(clippy::too_many_arguments)] // one a setting
    fn new(
        py: Python<'_>,
        page_size: Whole,
        eviction_policy: &str,
        policy_options: Option<&Bound<'_, PyAny>>,
        write_policy: Option<&str>,
        write_through_threshold: Option<Whole>,
        bigram: bool,
        events: bool,
        event_capacity: Whole,
        pin_capacity: Option<Whole>,
        host_order: &str,
    ) -> PyResult<Self> {
        let host_order = HostOrder::from_name(host_order).map_err(|error| tree_error(py, error))?;
        let write_policy =
            write_policy.map(WritePolicy::from_name).transpose().map_err(|error| tree_error(py, error))?;
        let page_size = page_size.page_size(py)?;
        let config = TreeConfig {
            page_size,
            eviction_policy: eviction_policy.to_owned(),
            policy_options: self::policy_options(policy_options)?,
            write_policy,
            write_through_threshold: match write_through_threshold {
                None => None,
                Some(value) => Some(value.at_least(py, "write_through_threshold", 1)? as u64),
            },
            bigram,
            events,
            event_capacity: event_capacity.at_least(py, "event_capacity", 1)?,
            pin_capacity: match pin_capacity {
                None => None,
                Some(value) => Some(value.at_least(py, "pin_capacity", 0)? as u64),
            },
            host_order,
        };
        let tree = Tree::new(config).map_err(|error| tree_error(py, error))?;
        let long_insert = if events { LONG_HASHES.min(page_size * LONG_PAGES) } else { LONG_TOKENS };
        Ok(Self { tree: Guarded::new(tree), long_insert })
    }

    #[pyo3(signature = (tokens, *, extra_key=None, cache_salt=None, include_evicted=true))]
    fn match_prefix(
        &self,
        py: Python<'_>,
        tokens: &Bound<'_, PyAny>,
        extra_key: Option<&Bound<'_, PyAny>>,
        cache_salt: Option<&Bound<'_, PyAny>>,
        include_evicted: bool,
    ) -> PyResult<Match> {
        let words = Words::of(tokens, "tokens")?;
        let tokens = words.tokens();
        let space = Space::of(extra_key, cache_salt)?;
        let space = space.get();
        self.try_run(py, tokens.len() >= LONG_TOKENS, |tree| {
            tree.match_prefix(tokens, space, include_evicted)
        })
        .map(Match::new)
    }

    #[pyo3(signature = (tokens, *, extra_key=None, cache_salt=None, include_evicted=true))]
    fn peek_prefix(
        &self,
        py: Python<'_>,
        tokens: &Bound<'_, PyAny>,
        extra_key: Option<&Bound<'_, PyAny>>,
        cache_salt: Option<&Bound<'_, PyAny>>,
        include_evicted: bool,
    ) -> PyResult<Match> {
        let words = Words::of(tokens, "tokens")?;
        let tokens = words.tokens();
        let space = Space::of(extra_key, cache_salt)?;
        let space = space.get();
        self.try_run(py, tokens.len() >= LONG_TOKENS, |tree| tree.peek_prefix(tokens, space, include_evicted))
            .map(Match::new)
    }

    #[pyo3(signature = (keys, *, extra_keys=None, cache_salts=None))]
    fn match_prefixes(
        &self,
        py: Python<'_>,
        keys: &Bound<'_, PyAny>,
        extra_keys: Option<&Bound<'_, PyAny>>,
        cache_salts: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Vec<Match>> {
        let keys = items(keys, "keys")?;
        let words = keys
            .iter()
            .enumerate()
            .map(|(at, key)| Words::of(key, &format!("keys[{at}]")))
            .collect::<PyResult<Vec<_>>>()?;
        let extra_keys = texts(extra_keys, "extra_keys", keys.len())?;
        let cache_salts = texts(cache_salts, "cache_salts", keys.len())?;
        let queue: Vec<_> = words
            .iter()
            .enumerate()
            .map(|(at, words)| {
                let (extra_key, cache_salt) = (extra_keys[at].as_deref(), cache_salts[at].as_deref());
                (words.tokens(), Namespace { extra_key, cache_salt })
            })
            .collect();
        let total: usize = queue.iter().map(|(tokens, _)| tokens.len()).sum();
        let matches = self.try_run(py, total >= LONG_TOKENS, |tree| tree.match_prefixes(&queue))?;
        Ok(matches.into_iter().map(Match::new).collect())
    }

    #[pyo3(
        signature = (tokens, pages, *, prev_prefix_len=Whole::Number(0), inserted_len=Whole::Number(0), extra_key=None, cache_salt=None,
                     priority=Whole::Number(0), chunked=false),
        text_signature = "($self, tokens, pages, *, prev_prefix_len=0, inserted_len=0, extra_key=None, cache_salt=None, \
                          priority=0, chunked=False)"
    )]
    #[allow(clippy::too_many_arguments)] // what the tree must know of the request
    fn insert(
        &self,
        py: Python<'_>,
        tokens: &Bound<'_, PyAny>,
        pages: &Bound<'_, PyAny>,
        prev_prefix_len: Whole,
        inserted_len: Whole,
        extra_key: Option<&Bound<'_, PyAny>>,
        cache_salt: Option<&Bound<'_, PyAny>>,
        priority: Whole,
        chunked: bool,
    ) -> PyResult<Inserted> {
        let words = Words::of(tokens, "tokens")?;
        let tokens = words.tokens();
        let pages = page_ids(pages, "pages")?;
        let pages = pages.as_slice();
        let prev_prefix_len = prev_prefix_len.at_least(py, "prev_prefix_len", 0)?;
        let inserted_len = inserted_len.at_least(py, "inserted_len", 0)?;
        let priority = priority.exact(py, "priority")?;
        let space = Space::of(extra_key, cache_salt)?;
        let space = space.get();
        self.try_run(py, tokens.len() >= self.long_insert, |tree| {
            tree.insert(InsertArgs {
                tokens,
                pages,
                prev_prefix_len,
                inserted_len,
                namespace: space,
                priority,
                chunked,
            })
        })
        .map(Inserted::new)
    }

    fn inc_lock_ref(&self, py: Python<'_>, node: NodeArg) -> PyResult<LockReceipt> {
        self.try_run(py, false, |tree| tree.inc_lock_ref(node.0)).map(LockReceipt)
    }

    fn dec_lock_ref(&self, py: Python<'_>, lock: &Bound<'_, PyAny>) -> PyResult<()> {
        let Ok(receipt) = lock.cast::<LockReceipt>() else {
            return Err(lock_error(py, format!("lock is {}, not a receipt of inc_lock_ref", show(lock))));
        };
        let receipt = &mut receipt.try_borrow_mut().map_err(|_| in_use(py, "lock"))?.0;
        self.try_run(py, false, |tree| tree.dec_lock_ref(receipt))
    }

    fn inc_host_lock_ref(&self, py: Python<'_>, node: NodeArg) -> PyResult<HostLockReceipt> {
        self.try_run(py, false, |tree| tree.inc_host_lock_ref(node.0)).map(HostLockReceipt)
    }

    fn dec_host_lock_ref(&self, py: Python<'_>, lock: &Bound<'_, PyAny>) -> PyResult<()> {
        let Ok(receipt) = lock.cast::<HostLockReceipt>() else {
            return Err(lock_error(
                py,
                format!("lock is {}, not a receipt of inc_host_lock_ref", show(lock)),
            ));
        };
        let receipt = &mut receipt.try_borrow_mut().map_err(|_| in_use(py, "lock"))?.0;
        self.try_run(py, false, |tree| tree.dec_host_lock_ref(receipt))
    }

    #[pyo3(signature = (num_pages, *, host_room=None))]
    fn evict(&self, py: Python<'_>, num_pages: Whole, host_room: Option<Whole>) -> PyResult<Evicted> {
        let num_pages = num_pages.at_least(py, "num_pages", 0)?;
        let host_room = host_room.map(|room| room.at_least(py, "host_room", 0)).transpose()?;
        self.run(py, num_pages >= LONG_PAGES, |tree| tree.evict(num_pages, host_room)).map(Evicted)
    }

    fn drop(&self, py: Python<'_>, nodes: NodeList) -> PyResult<Evicted> {
        self.try_run(py, nodes.0.len() >= LONG_NODES, |tree| tree.drop_nodes(&nodes.0)).map(Evicted)
    }

    fn evict_host(&self, py: Python<'_>, num_pages: Whole) -> PyResult<HostEvicted> {
        let num_pages = num_pages.at_least(py, "num_pages", 0)?;
        self.run(py, num_pages >= LONG_PAGES, |tree| tree.evict_host(num_pages)).map(HostEvicted)
    }

    fn evictable_host_pages(&self, py: Python<'_>, limit: Whole) -> PyResult<usize> {
        let limit = limit.at_least(py, "limit", 0)?;
        self.run(py, limit >= LONG_PAGES, |tree| tree.evictable_host_pages(limit))
    }

    fn plan_backup(&self, py: Python<'_>, nodes: NodeList) -> PyResult<BackupPlan> {
        self.run(py, nodes.0.len() >= LONG_NODES, |tree| tree.plan_backup(&nodes.0)).map(BackupPlan)
    }

    fn begin_backup(&self, py: Python<'_>, nodes: NodeList, host_pages: &Bound<'_, PyAny>) -> PyResult<Ack> {
        let pages = page_ids(host_pages, "host_pages")?;
        let pages = pages.as_slice();
        self.try_run(py, nodes.0.len() >= LONG_NODES, |tree| tree.begin_backup(&nodes.0, pages)).map(Ack)
    }

    fn finish_backup(&self, py: Python<'_>, ack: &Bound<'_, PyAny>) -> PyResult<BackupDone> {
        let ack = ack_of(ack)?;
        self.end_copy(py, ack, |tree| tree.finish_backup(ack)).map(BackupDone)
    }

    fn cancel_backup<'py>(&self, py: Python<'py>, ack: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let ack = ack_of(ack)?;
        let pages = self.end_copy(py, ack, |tree| tree.cancel_backup(ack))?;
        Ok(results::page_array(py, &pages))
    }

    fn plan_load_back(slf: &Bound<'_, Self>, node: NodeArg) -> PyResult<LoadBackPlan> {
        let plan = slf.get().try_run(slf.py(), false, |tree| tree.plan_load_back(node.0))?;
        Ok(LoadBackPlan { plan, tree: slf.clone().unbind() })
    }

    fn begin_load_back(
        &self,
        py: Python<'_>,
        plan: &Bound<'_, PyAny>,
        device_pages: &Bound<'_, PyAny>,
    ) -> PyResult<Ack> {
        let Ok(plan) = plan.cast::<LoadBackPlan>() else {
            return Err(lock_error(py, format!("plan is {}, not a plan of plan_load_back", show(plan))));
        };
        let pages = page_ids(device_pages, "device_pages")?;
        let pages = pages.as_slice();
        let plan = &mut plan.try_borrow_mut().map_err(|_| in_use(py, "plan"))?.plan;
        let long = plan.nodes().len() >= LONG_LOAD_NODES;
        self.try_run(py, long, |tree| tree.begin_load_back(plan, pages)).map(Ack)
    }

    fn finish_load_back(&self, py: Python<'_>, ack: &Bound<'_, PyAny>) -> PyResult<()> {
        let ack = ack_of(ack)?;
        self.end_copy(py, ack, |tree| tree.finish_load_back(ack))
    }

    fn cancel_load_back<'py>(&self, py: Python<'py>, ack: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let ack = ack_of(ack)?;
        let pages = self.end_copy(py, ack, |tree| tree.cancel_load_back(ack))?;
        Ok(results::page_array(py, &pages))
    }

    #[pyo3(signature = (anchor, tokens, host_pages, *, hashes=None, extra_key=None, cache_salt=None))]
    #[allow(clippy::too_many_arguments)] // what is inserted, and where
    fn insert_host(
        &self,
        py: Python<'_>,
        anchor: NodeArg,
        tokens: &Bound<'_, PyAny>,
        host_pages: &Bound<'_, PyAny>,
        hashes: Option<&Bound<'_, PyAny>>,
        extra_key: Option<&Bound<'_, PyAny>>,
        cache_salt: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<HostInserted> {
        let words = Words::of(tokens, "tokens")?;
        let tokens = words.tokens();
        let pages = page_ids(host_pages, "host_pages")?;
        let pages = pages.as_slice();
        let hashes = hashes.map(|hashes| digests(hashes, "hashes")).transpose()?;
        let space = Space::of(extra_key, cache_salt)?;
        let space = space.get();
        self.try_run(py, tokens.len() >= self.long_insert, |tree| {
            tree.insert_host(InsertHostArgs {
                anchor: anchor.0,
                tokens,
                host_pages: pages,
                hashes: hashes.as_deref(),
                namespace: space,
            })
        })
        .map(HostInserted)
    }

    #[pyo3(signature = (node, expires_at=None))]
    fn pin(&self, py: Python<'_>, node: NodeArg, expires_at: Option<&Bound<'_, PyAny>>) -> PyResult<Pin> {
        let expires_at = expires_at.map(|at| time(at, "expires_at")).transpose()?;
        self.try_run(py, false, |tree| tree.pin(node.0, expires_at)).map(Pin)
    }

    fn unpin(&self, py: Python<'_>, pin: &Bound<'_, PyAny>) -> PyResult<()> {
        let Ok(pin) = pin.cast::<Pin>() else {
            return Err(lock_error(py, format!("pin is {}, not a pin of this tree", show(pin))));
        };
        let pin = pin.get().0;
        self.try_run(py, false, |tree| tree.unpin(pin))
    }

    fn expire_pins(&self, py: Python<'_>, now: &Bound<'_, PyAny>) -> PyResult<usize> {
        let now = time(now, "now")?;
        self.run(py, false, |tree| tree.expire_pins(now))
    }

    fn node_info(&self, py: Python<'_>, node: NodeArg) -> PyResult<NodeInfo> {
        self.try_run(py, false, |tree| tree.node_info(node.0)).map(NodeInfo)
    }

    fn pending_acks(&self, py: Python<'_>, node: NodeArg) -> PyResult<Vec<Ack>> {
        let acks = self.try_run(py, false, |tree| tree.pending_acks(node.0))?;
        Ok(acks.into_iter().map(Ack).collect())
    }

    fn host_nodes(&self, py: Python<'_>) -> PyResult<Vec<NodeId>> {
        self.run(py, true, |tree| tree.host_nodes())
    }

    fn page_counts(&self, py: Python<'_>, nodes: NodeList) -> PyResult<Vec<usize>> {
        self.try_run(py, nodes.0.len() >= LONG_NODES, |tree| tree.page_counts(&nodes.0))
    }

    fn page_hashes<'py>(&self, py: Python<'py>, node: NodeArg) -> PyResult<Bound<'py, PyAny>> {
        digest_array(py, &self.try_run(py, true, |tree| tree.page_hashes(node.0))?)
    }

    fn prefix_hashes<'py>(&self, py: Python<'py>, node: NodeArg) -> PyResult<Bound<'py, PyAny>> {
        digest_array(py, &self.try_run(py, true, |tree| tree.prefix_hashes(node.0))?)
    }

    fn node_tokens<'py>(&self, py: Python<'py>, node: NodeArg) -> PyResult<Bound<'py, PyAny>> {
        Ok(page_array(py, &self.try_run(py, false, |tree| tree.node_tokens(node.0))?))
    }

    fn node_namespace(&self, py: Python<'_>, node: NodeArg) -> PyResult<(Option<String>, Option<String>)> {
        self.try_run(py, false, |tree| {
            let namespace = tree.node_namespace(node.0)?;
            let owned = |text: Option<&str>| text.map(str::to_owned);
            Ok((owned(namespace.extra_key), owned(namespace.cache_salt)))
        })
    }

    #[getter]
    fn root(&self, py: Python<'_>) -> PyResult<NodeId> {
        self.number(py, Tree::root)
    }

    #[getter]
    fn page_size(&self, py: Python<'_>) -> PyResult<usize> {
        self.number(py, Tree::page_size)
    }

    #[getter]
    fn evictable_tokens(&self, py: Python<'_>) -> PyResult<u64> {
        self.number(py, Tree::evictable_tokens)
    }

    #[getter]
    fn protected_tokens(&self, py: Python<'_>) -> PyResult<u64> {
        self.number(py, Tree::protected_tokens)
    }

    #[getter]
    fn device_tokens(&self, py: Python<'_>) -> PyResult<u64> {
        self.number(py, Tree::device_tokens)
    }

    #[getter]
    fn host_tokens(&self, py: Python<'_>) -> PyResult<u64> {
        self.number(py, Tree::host_tokens)
    }

    #[getter]
    fn pending_host_tokens(&self, py: Python<'_>) -> PyResult<u64> {
        self.number(py, Tree::pending_host_tokens)
    }

    #[getter]
    fn pinned_tokens(&self, py: Python<'_>) -> PyResult<u64> {
        self.number(py, Tree::pinned_tokens)
    }

    #[getter]
    fn page_hash_count(&self, py: Python<'_>) -> PyResult<u64> {
        self.number(py, Tree::page_hash_count)
    }

    fn __len__(&self, py: Python<'_>) -> PyResult<usize> {
        self.number(py, Tree::len)
    }

    /// An empty tree is a tree.
    #[allow(clippy::unused_self)]
    fn __bool__(&self) -> bool {
        true
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        self.number(py, |tree| {
            format!(
                "<PrefixTree: {} nodes, {} tokens on device, {} on host>",
                tree.len(),
                tree.device_tokens(),
                tree.host_tokens()
            )
        })
    }

    fn check_invariants(&self, py: Python<'_>) -> PyResult<()> {
        self.try_run(py, true, |tree| tree.check_invariants())
    }

    fn digest(&self, py: Python<'_>) -> PyResult<u64> {
        self.number(py, Tree::digest)
    }

    fn take_events<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let events = self.run(py, true, Tree::take_events)?;
        events.into_iter().map(|event| event_object(py, event)).collect()
    }

    fn reset(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| self.tree.renew(Tree::reset)).map_err(|error| guard_error(py, &error))
    }

    #[staticmethod]
    fn eviction_policies() -> Vec<&'static str> {
        policy_names()
    }
}

/// Digests of the whole pages of a key, without a tree.
#[pyfunction]
#[pyo3(
    signature = (tokens, page_size, *, parent=None, extra_key=None, cache_salt=None, bigram=false),
    text_signature = "(tokens, page_size, *, parent=None, extra_key=None, cache_salt=None, bigram=False)"
)]
#[allow(clippy::too_many_arguments)] // a key and where its chain begins
fn page_hashes<'py>(
    py: Python<'py>,
    tokens: &Bound<'py, PyAny>,
    page_size: Whole,
    parent: Option<&Bound<'py, PyAny>>,
    extra_key: Option<&Bound<'_, PyAny>>,
    cache_salt: Option<&Bound<'_, PyAny>>,
    bigram: bool,
) -> PyResult<Bound<'py, PyAny>> {
    let words = Words::of(tokens, "tokens")?;
    let tokens = words.tokens();
    let parent = match parent {
        None => None,
        Some(parent) => match digests(parent, "parent")?.as_slice() {
            [digest] => Some(*digest),
            other => {
                let text = format!("parent has {} digests, one is needed (32 bytes)", other.len());
                return Err(argument_error(py, text));
            }
        },
    };
    let size = page_size.page_size(py)?;
    let space = Space::of(extra_key, cache_salt)?;
    let space = space.get();
    let hash = || crate::page_hashes(tokens, size, parent.as_ref(), space, bigram);
    let hashes = if tokens.len() >= LONG_HASHES { py.detach(hash) } else { hash() };
    digest_array(py, &hashes.map_err(|error| tree_error(py, error))?)
}

#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", PyString::new(module.py(), env!("CARGO_PKG_VERSION")))?;
    module.add("DEBUG_BUILD", cfg!(debug_assertions))?;
    module.add_class::<PrefixTree>()?;
    module.add_class::<replay::Replay>()?;
    results::register(module)?;
    module.add_class::<copies::PageMemory>()?;
    module.add_class::<io_queue::IoQueue>()?;
    module.add_class::<stored::PyStoredTree>()?;
    module.add_class::<stored::PyLogPart>()?;
    module.add_function(wrap_pyfunction!(stored::prefix_record, module)?)?;
    module.add_function(wrap_pyfunction!(copies::copy_pages, module)?)?;
    module.add_function(wrap_pyfunction!(checksum::object_checksums, module)?)?;
    module.add_function(wrap_pyfunction!(checksum::copy_objects, module)?)?;
    module.add_function(wrap_pyfunction!(objects::write_object_headers, module)?)?;
    module.add_function(wrap_pyfunction!(objects::check_object_headers, module)?)?;
    module.add_function(wrap_pyfunction!(objects::read_object, module)?)?;
    module.add_function(wrap_pyfunction!(objects::find_slots, module)?)?;
    module.add_function(wrap_pyfunction!(objects::locate_objects, module)?)?;
    module.add_function(wrap_pyfunction!(objects::read_slot_table, module)?)?;
    module.add_function(wrap_pyfunction!(page_hashes, module)?)
}
