//! One function for each kind of call.

use rust_tree_core::{Error, InsertArgs, InsertHostArgs, Namespace, NodeId, Tokens, Tree};

use super::super::script::{Call, Source};
use super::super::tokens::{Key, NAMESPACES, positions, raw_tokens};
use super::super::tree::{
    BackupDone, BackupPlan, Found, HostInserted, Inserted, LoadPlan, Names, Node, page_digests,
};
use super::{Driver, Effect, NO_HANDLE, Pool, agree, both, equal, index, see_evicted};

type Outcome = Result<Effect, String>;

/// Results that are kept to be looked at again; more would only cost time.
const OLD_RESULTS: usize = 4;

fn effect(changed: bool) -> Effect {
    if changed { Effect::Changed } else { Effect::Same }
}

fn keep<T>(old: &mut Vec<T>, result: T) {
    if old.len() == OLD_RESULTS {
        old.remove(0);
    }
    old.push(result);
}

/// A count that is off by a little.
fn shifted(count: usize, off: i8) -> usize {
    count.saturating_add_signed(isize::from(off))
}

fn borrowed(names: &Names) -> Namespace<'_> {
    Namespace { extra_key: names.0.as_deref(), cache_salt: names.1.as_deref() }
}

impl Driver<'_> {
    pub(super) fn make(&mut self, call: &Call) -> Outcome {
        match call {
            Call::Match { key, evicted } => self.match_prefix(key, *evicted),
            Call::Peek { key, evicted } => self.peek_prefix(key, *evicted),
            Call::MatchMany { keys } => self.match_prefixes(keys),
            Call::MatchNode { node, less } => self.match_node(*node, *less),
            Call::Insert { .. } => self.insert(call),
            Call::Lock { node } => self.lock(*node),
            Call::Unlock { lock } => self.unlock(*lock),
            Call::HostLock { node } => self.host_lock(*node),
            Call::HostUnlock { lock } => self.host_unlock(*lock),
            Call::Again { what, pick } => self.again(*what, *pick),
            Call::Foreign { what } => self.foreign(*what),
            Call::Unknown { what, pick } => self.unknown(*what, *pick),
            Call::Evict { pages, room } => self.evict(*pages, *room),
            Call::Drop { picks, flaw } => self.drop_nodes(picks, *flaw),
            Call::EvictHost { pages } => self.evict_host(*pages),
            Call::EvictableHost { limit } => self.evictable_host_pages(*limit),
            Call::Backup { source, picks, plan, off } => self.backup(*source, picks, *plan, *off),
            Call::FinishBackup { ack } => self.finish_backup(*ack),
            Call::CancelBackup { ack } => self.cancel_backup(*ack),
            Call::PlanLoad { node, evicted } => self.plan_load(*node, *evicted),
            Call::BeginLoad { plan, off } => self.begin_load(*plan, *off),
            Call::CancelPlan { plan } => self.cancel_plan(*plan),
            Call::FinishLoad { ack } => self.finish_load(*ack),
            Call::CancelLoad { ack } => self.cancel_load(*ack),
            Call::InsertHost { .. } => self.insert_host(call),
            Call::Pin { node, until } => self.pin(*node, *until),
            Call::Unpin { pin } => self.unpin(*pin),
            Call::Expire { now } => self.expire(*now),
            Call::Hashes { node } => self.hashes(*node),
            Call::TakeEvents => self.compare_events().map(|()| Effect::Same),
            Call::Reset => self.reset(),
        }
    }

    // ---- what the indices mean ----

    /// Any live node, the root included. Some numbers prefer the nodes that random picks seldom
    /// meet in time.
    fn pick_node(&self, pick: u8) -> NodeId {
        let preferred = match pick {
            160..208 => self.nodes_that(|_, node| node.pending.is_some()),
            208.. => self.nodes_that(|_, node| !node.on_device()),
            _ => Vec::new(),
        };
        if let Some(index) = index(pick, preferred.len()) {
            return preferred[index];
        }
        let mut ids = vec![self.model.root()];
        ids.extend(self.model.nodes().keys());
        ids[usize::from(pick) % ids.len()]
    }

    /// The live nodes that are as wanted.
    fn nodes_that(&self, wanted: impl Fn(NodeId, &Node) -> bool) -> Vec<NodeId> {
        let nodes = self.model.nodes().iter();
        let wanted = nodes.filter(|(id, node)| wanted(**id, node));
        wanted.map(|(&id, _)| id).collect()
    }

    /// A node that is dead, or that never was.
    fn dead_node(&self, pick: u8) -> NodeId {
        let next = self.model.next_id();
        let dead = (0..next).filter(|id| *id != self.model.root() && !self.model.nodes().contains_key(id));
        let mut dead: Vec<NodeId> = dead.collect();
        dead.extend([next, next + 1000, u64::from(u32::MAX), NodeId::MAX]);
        dead[usize::from(pick) % dead.len()]
    }

    fn pages_of(&self, ids: &[NodeId]) -> usize {
        let nodes = ids.iter().filter_map(|id| self.model.nodes().get(id));
        nodes.map(|node| node.tokens() / self.config.page_size).sum()
    }

    // ---- match and insert ----

    fn match_prefix(&mut self, key: &Key, evicted: bool) -> Outcome {
        let buffer = key.buffer(self.config.page_size);
        let (tokens, namespace) = (buffer.tokens(), key.namespace());
        let got = self.tree.match_prefix(tokens, namespace, evicted);
        let want = self.model.match_prefix(tokens, namespace, evicted);
        let done = agree(got, want, |found| self.see_match(found))?;
        let Some((got, want)) = done else {
            return Ok(Effect::Same);
        };
        let nothing = want.device_length + want.host_hit_length == 0;
        keep(&mut self.old_matches, (got, want.device_pages));
        Ok(effect(!nothing))
    }

    fn peek_prefix(&mut self, key: &Key, evicted: bool) -> Outcome {
        let buffer = key.buffer(self.config.page_size);
        let (tokens, namespace) = (buffer.tokens(), key.namespace());
        let got = self.tree.peek_prefix(tokens, namespace, evicted);
        let want = self.model.peek_prefix(tokens, namespace, evicted);
        if let Some((got, want)) = agree(got, want, |found| self.see_match(found))? {
            keep(&mut self.old_matches, (got, want.device_pages));
        }
        Ok(Effect::Same)
    }

    fn match_node(&mut self, node: u8, less: u8) -> Outcome {
        let id = self.pick_node(node);
        let Some(node) = self.model.nodes().get(&id) else {
            return Ok(Effect::Same);
        };
        let less = usize::from(less) * self.config.page_size;
        let raw = raw_tokens(&node.key[..node.end().saturating_sub(less)]);
        let names = node.names.clone();
        let (tokens, namespace) = (Tokens::U32(&raw), borrowed(&names));
        let got = self.tree.match_prefix(tokens, namespace, true);
        let want = self.model.match_prefix(tokens, namespace, true);
        let done = agree(got, want, |found| self.see_match(found))?;
        Ok(match done {
            Some((_, want)) if want.last_host_node != self.model.root() => Effect::Changed,
            _ => Effect::Same,
        })
    }

    fn match_prefixes(&mut self, keys: &[Key]) -> Outcome {
        let buffers: Vec<_> = keys.iter().map(|key| key.buffer(self.config.page_size)).collect();
        let calls: Vec<_> =
            buffers.iter().zip(keys).map(|(buffer, key)| (buffer.tokens(), key.namespace())).collect();
        let got = self.tree.match_prefixes(&calls);
        let want = self.model.match_prefixes(&calls);
        let done = agree(got, want, |all| -> Vec<Found> {
            all.iter().map(|found| self.see_match(found)).collect()
        })?;
        Ok(effect(done.is_some()))
    }

    fn insert(&mut self, call: &Call) -> Outcome {
        let Call::Insert { key, prev, lent, own, inserted, priority, chunked, flaw, off } = call else {
            unreachable!("an insert");
        };
        let size = self.config.page_size;
        let raw = key.raw(size);
        let buffer = key.wrap(&raw);
        let count = positions(&raw, self.config.bigram).len() / size;
        // The key without its bad token, so that the pages are the right ones but for that.
        let good = Key { bad: None, ..key.clone() };
        let peeked =
            self.model.peek_prefix(good.wrap(&raw).tokens(), key.namespace(), true).expect("a good key");
        let in_tree = peeked.device_pages;
        let prev = usize::from(*prev) % (in_tree.len() + 1);

        let mut pages = Vec::new();
        let mut fresh = Vec::new();
        for page in 0..shifted(count, *off) {
            let is_own = if page < prev { *lent } else { own & (1 << (page % 8)) != 0 };
            match in_tree.get(page) {
                Some(&page) if is_own => pages.push(page),
                _ => {
                    let taken = self.device.take(1);
                    pages.extend(&taken);
                    fresh.extend(taken);
                }
            }
        }
        let args = InsertArgs {
            tokens: buffer.tokens(),
            pages: &pages,
            prev_prefix_len: match flaw {
                1 if size > 1 => prev * size + 1,
                2 => (in_tree.len() + 1) * size,
                _ => prev * size,
            },
            // In half pages, and always a number that ends no page where pages are longer than one.
            inserted_len: usize::from(*inserted) * size.div_ceil(2),
            namespace: key.namespace(),
            priority: i64::from(*priority),
            chunked: *chunked,
        };
        let want = self.model.insert(&args);
        let got = self.tree.insert(args);
        let done = agree(got, want, |inserted| Inserted {
            prefix_len: inserted.prefix_len,
            duplicate_pages: inserted.duplicate_pages.clone(),
            device_pages: inserted.device_pages(),
            node: inserted.node,
            backup_nodes: inserted.backup_nodes.clone(),
            pending_ack: inserted.pending_ack.map(|ack| self.handle_of(ack)),
        })?;
        // The tree keeps what it did not have; the rest goes back.
        let Some((got, want)) = done else {
            self.device.give(&fresh)?;
            return Ok(Effect::Same);
        };
        self.device.give(&want.duplicate_pages)?;
        if !lent {
            // Not named as duplicates: the caller says that it borrowed what is there.
            self.device.give(&pages[..prev])?;
        }
        self.wanted.extend(&want.backup_nodes);
        let nothing = want.device_pages.is_empty();
        keep(&mut self.old_inserts, (got, want.device_pages));
        Ok(effect(!nothing))
    }

    // ---- locks and pins ----

    fn lock(&mut self, node: u8) -> Outcome {
        let id = self.pick_node(node);
        let done = both(self.tree.inc_lock_ref(id), self.model.inc_lock_ref(id))?;
        self.locks.live.extend(done);
        Ok(Effect::Changed)
    }

    fn unlock(&mut self, pick: u8) -> Outcome {
        let Some((mut lock, handle)) = self.locks.take(pick) else {
            return Ok(Effect::Same);
        };
        let got = self.tree.dec_lock_ref(&mut lock);
        let done = both(got, self.model.dec_lock_ref(handle))?;
        self.locks.used.push((lock, handle));
        Ok(effect(done.is_some()))
    }

    fn host_lock(&mut self, node: u8) -> Outcome {
        let id = self.pick_node(node);
        let got = self.tree.inc_host_lock_ref(id);
        let done = both(got, self.model.inc_host_lock_ref(id))?;
        self.host_locks.live.extend(done);
        Ok(Effect::Changed)
    }

    fn host_unlock(&mut self, pick: u8) -> Outcome {
        let Some((mut lock, handle)) = self.host_locks.take(pick) else {
            return Ok(Effect::Same);
        };
        let got = self.tree.dec_host_lock_ref(&mut lock);
        let done = both(got, self.model.dec_host_lock_ref(handle))?;
        self.host_locks.used.push((lock, handle));
        Ok(effect(done.is_some()))
    }

    fn pin(&mut self, node: u8, until: Option<u8>) -> Outcome {
        let id = self.pick_node(node);
        // Nothing says whether a pin on the root counts among those that expire, nor whether it
        // needs a host tier.
        if id == self.model.root() && (until.is_some() || self.config.write.is_none()) {
            return Ok(Effect::Same);
        }
        let until = until.map(f64::from);
        let done = both(self.tree.pin(id, until), self.model.pin(id, until))?;
        let Some(pin) = done else {
            return Ok(Effect::Same);
        };
        self.pins.live.push(pin);
        Ok(Effect::Changed)
    }

    /// Pins that expired are among them: those must be refused.
    fn unpin(&mut self, pick: u8) -> Outcome {
        let Some((pin, handle)) = self.pins.take(pick) else {
            return Ok(Effect::Same);
        };
        let done = both(self.tree.unpin(pin), self.model.unpin(handle))?;
        self.pins.used.push((pin, handle));
        Ok(effect(done.is_some()))
    }

    fn expire(&mut self, now: u8) -> Outcome {
        let now = f64::from(now);
        let want = self.model.expire_pins(now);
        equal("pins that ended", &self.tree.expire_pins(now), &want)?;
        Ok(effect(want > 0))
    }

    // ---- eviction ----

    fn evict(&mut self, pages: u8, room: Option<u8>) -> Outcome {
        let (pages, room) = (usize::from(pages), room.map(usize::from));
        let got = self.tree.evict(pages, room);
        let want = self.model.evict(pages, room);
        equal("evicted", &see_evicted(&got), &want)?;
        self.device.give(&want.device_pages)?;
        self.host.give(&want.host_pages)?;
        Ok(Effect::Changed)
    }

    fn drop_nodes(&mut self, picks: &[u8], flaw: u8) -> Outcome {
        let mut owners = self.nodes_that(|id, node| node.hold == Some(id));
        let mut ids = Vec::new();
        for &pick in picks {
            if let Some(index) = index(pick, owners.len()) {
                ids.push(owners.remove(index));
            }
        }
        let pick = picks.first().copied().unwrap_or(0);
        match flaw {
            1 => ids.extend(ids.first().copied()),
            2 => {
                let others = self.nodes_that(|_, node| node.hold.is_none());
                ids.extend(index(pick, others.len()).map(|index| others[index]));
            }
            3 => ids.push(self.dead_node(pick)),
            4 => ids.extend(self.nodes_that(|id, node| node.hold.is_some_and(|owner| owner != id))),
            _ => {}
        }
        let got = self.tree.drop_nodes(&ids);
        let done = agree(got, self.model.drop_nodes(&ids), see_evicted)?;
        let Some((_, want)) = done else {
            return Ok(Effect::Same);
        };
        self.device.give(&want.device_pages)?;
        self.host.give(&want.host_pages)?;
        Ok(Effect::Changed)
    }

    fn evict_host(&mut self, pages: u8) -> Outcome {
        let pages = usize::from(pages);
        let foretold = self.tree.evictable_host_pages(pages);
        let got = self.tree.evict_host(pages);
        equal("host pages foretold", &foretold, &got.host_pages.len().min(pages))?;
        let want = self.model.evict_host(pages);
        equal("evicted from host", &got, &want)?;
        self.host.give(&want.host_pages)?;
        Ok(Effect::Changed)
    }

    fn evictable_host_pages(&mut self, limit: u8) -> Outcome {
        let limit = usize::from(limit);
        let got = self.tree.evictable_host_pages(limit);
        equal("host pages that could go", &got, &self.model.evictable_host_pages(limit))?;
        Ok(Effect::Same)
    }

    // ---- backup ----

    fn backup(&mut self, source: Source, picks: &[u8], plan: bool, off: i8) -> Outcome {
        let all = match source {
            Source::Wanted => std::mem::take(&mut self.wanted),
            Source::Held => self.nodes_that(|_, node| node.hold.is_some()),
            Source::Any => {
                let mut all = self.nodes_that(|_, _| true);
                all.push(self.model.root());
                all.push(self.dead_node(0));
                all
            }
        };
        let picked = picks.iter().filter_map(|&pick| index(pick, all.len()));
        let mut ids: Vec<NodeId> = picked.map(|index| all[index]).collect();
        let no_picks = match source {
            Source::Wanted => picks.len() < 2,
            Source::Held => picks.is_empty(),
            Source::Any => false,
        };
        if no_picks {
            ids = all;
        }

        let got = self.tree.plan_backup(&ids);
        let got = BackupPlan { nodes: got.nodes, pages: got.pages, device_pages: got.device_pages };
        let want = self.model.plan_backup(&ids);
        equal("backup plan", &got, &want)?;
        if plan {
            ids = want.nodes;
        }
        let host_pages = self.host.take(shifted(self.pages_of(&ids), off));
        let got = self.tree.begin_backup(&ids, &host_pages);
        let Some((ack, handle)) = both(got, self.model.begin_backup(&ids, &host_pages))? else {
            self.host.give(&host_pages)?;
            return Ok(Effect::Same);
        };
        self.acks.push((ack, handle));
        self.backups.live.push((ack, handle));
        Ok(Effect::Changed)
    }

    fn finish_backup(&mut self, pick: u8) -> Outcome {
        let Some((ack, handle)) = self.backups.take(pick) else {
            return Ok(Effect::Same);
        };
        let got = self.tree.finish_backup(ack);
        let done = agree(got, self.model.finish_backup(handle), |done| BackupDone {
            nodes: done.nodes.clone(),
            device_pages: done.device_pages.clone(),
        })?;
        self.backups.used.push((ack, handle));
        if let Some((_, want)) = &done {
            self.device.give(&want.device_pages)?;
        }
        Ok(effect(done.is_some()))
    }

    fn cancel_backup(&mut self, pick: u8) -> Outcome {
        let Some((ack, handle)) = self.backups.take(pick) else {
            return Ok(Effect::Same);
        };
        let got = self.tree.cancel_backup(ack);
        let done = agree(got, self.model.cancel_backup(handle), Vec::clone)?;
        let Some((_, want)) = done else {
            self.backups.live.push((ack, handle));
            return Ok(Effect::Same);
        };
        self.backups.used.push((ack, handle));
        self.host.give(&want)?;
        Ok(Effect::Changed)
    }

    // ---- load-back ----

    fn plan_load(&mut self, pick: u8, evicted: bool) -> Outcome {
        let mut id = self.pick_node(pick);
        if evicted {
            let evicted = self.nodes_that(|_, node| !node.on_device());
            let Some(index) = index(pick, evicted.len()) else {
                return Ok(Effect::Same);
            };
            id = evicted[index];
        }
        let got = self.tree.plan_load_back(id);
        let mut want = self.model.plan_load_back(id);
        // The handle is the model's own, so it is no part of the comparison.
        let handle = match &mut want {
            Ok(plan) => std::mem::take(&mut plan.handle),
            Err(_) => NO_HANDLE,
        };
        let done = agree(got, want, |plan| LoadPlan {
            handle: 0,
            nodes: plan.nodes().to_vec(),
            pages: plan.pages(),
            host_pages: plan.host_pages().to_vec(),
            pending_ack: plan.pending_ack().map(|ack| self.handle_of(ack)),
        })?;
        if let Some((plan, _)) = done {
            self.plans.live.push((plan, handle));
        }
        Ok(Effect::Changed)
    }

    fn begin_load(&mut self, pick: u8, off: i8) -> Outcome {
        let Some((mut plan, handle)) = self.plans.take(pick) else {
            return Ok(Effect::Same);
        };
        let pages = self.device.take(shifted(plan.pages(), off));
        let got = self.tree.begin_load_back(&mut plan, &pages);
        let Some((ack, ack_handle)) = both(got, self.model.begin_load_back(handle, &pages))? else {
            self.device.give(&pages)?;
            self.plans.live.push((plan, handle));
            return Ok(Effect::Same);
        };
        self.plans.used.push((plan, handle));
        self.acks.push((ack, ack_handle));
        self.loads.live.push((ack, ack_handle));
        Ok(Effect::Changed)
    }

    fn cancel_plan(&mut self, pick: u8) -> Outcome {
        let Some((mut plan, handle)) = self.plans.take(pick) else {
            return Ok(Effect::Same);
        };
        let got = self.tree.cancel_load_back_plan(&mut plan);
        let done = both(got, self.model.cancel_load_back_plan(handle))?;
        self.plans.used.push((plan, handle));
        Ok(effect(done.is_some()))
    }

    fn finish_load(&mut self, pick: u8) -> Outcome {
        let Some((ack, handle)) = self.loads.take(pick) else {
            return Ok(Effect::Same);
        };
        let got = self.tree.finish_load_back(ack);
        let done = both(got, self.model.finish_load_back(handle))?;
        self.loads.used.push((ack, handle));
        Ok(effect(done.is_some()))
    }

    fn cancel_load(&mut self, pick: u8) -> Outcome {
        let Some((ack, handle)) = self.loads.take(pick) else {
            return Ok(Effect::Same);
        };
        let got = self.tree.cancel_load_back(ack);
        let done = agree(got, self.model.cancel_load_back(handle), Vec::clone)?;
        let Some((_, want)) = done else {
            self.loads.live.push((ack, handle));
            return Ok(Effect::Same);
        };
        self.loads.used.push((ack, handle));
        self.device.give(&want)?;
        Ok(Effect::Changed)
    }

    // ---- host insert ----

    /// Raw tokens past the anchor, and the namespace they are in.
    fn host_tokens(&self, anchor: NodeId, toward: Option<u8>, keep: u8, key: &Key) -> (Vec<u32>, Names) {
        let size = self.config.page_size;
        let nodes = self.model.nodes();
        let anchor_key = nodes.get(&anchor).map_or(&[][..], |node| &node.key);
        let below = self.nodes_that(|id, node| {
            let same_names = nodes.get(&anchor).is_none_or(|above| above.names == node.names);
            id != anchor && same_names && node.key.starts_with(anchor_key)
        });
        let target = toward.and_then(|pick| index(pick, below.len()));
        let target = target.map(|index| &nodes[&below[index]]);
        let mut names = super::super::tree::owned(key.namespace());
        let mut raw = Vec::new();
        if let Some(target) = target {
            let rest = &target.key[anchor_key.len()..];
            let kept = rest.len().min(usize::from(keep) * size);
            raw = raw_tokens(&rest[..kept]);
            names = target.names.clone();
        }
        if raw.is_empty() {
            // With bigram keys the first token is the anchor's last.
            raw.extend(anchor_key.last().and_then(|position| position.1));
        }
        if let Some(node) = nodes.get(&anchor) {
            names = node.names.clone();
        }
        raw.extend(key.raw(size));
        (raw, names)
    }

    fn insert_host(&mut self, call: &Call) -> Outcome {
        let Call::InsertHost { anchor, toward, keep, key, names, hashes, flaw, off } = call else {
            unreachable!("a host insert");
        };
        let size = self.config.page_size;
        let anchor = self.pick_node(*anchor);
        let (mut raw, own_names) = self.host_tokens(anchor, *toward, *keep, key);
        let at_root = anchor == self.model.root();
        if *flaw == 3 && !at_root && !raw.is_empty() {
            raw[0] ^= 1;
        }
        let tail = positions(&raw, self.config.bigram);
        let above = self.model.nodes().get(&anchor);
        let mut whole = above.map_or_else(Vec::new, |node| node.key.clone());
        let above = whole.len() / size;
        whole.extend(&tail);
        let mut rows = page_digests(&whole, size, &own_names).split_off(above);
        if *flaw == 1 && rows.pop().is_none() {
            rows.push([0; 32]);
        }
        if *flaw == 4 {
            let matched = raw_tokens(&whole);
            let matched = self.model.peek_prefix(Tokens::U32(&matched), borrowed(&own_names), true);
            let matched = matched.expect("a good key");
            let known = (matched.device_length + matched.host_hit_length) / size - above;
            rows[..known].fill([0; 32]);
        }
        let mut namespace = borrowed(&own_names);
        if *flaw == 2 && !at_root {
            let others = NAMESPACES.iter().skip(1);
            namespace = *others.clone().find(|other| **other != namespace).expect("more than one");
        } else if *names == 0 && !at_root {
            namespace = NAMESPACES[0];
        }
        let host_pages = self.host.take(shifted(tail.len() / size, *off));
        let buffer = key.wrap(&raw);
        let args = || InsertHostArgs {
            anchor,
            tokens: buffer.tokens(),
            host_pages: &host_pages,
            hashes: (*hashes || *flaw == 1 || *flaw == 4).then_some(&rows[..]),
            namespace,
        };
        let got = self.tree.insert_host(args());
        if *flaw == 4 && matches!(got, Err(Error::Argument(_))) {
            // The wrong rows show only where digests were computed before, which is the tree's
            // own affair. Where they do not, they change nothing.
            self.host.give(&host_pages)?;
            return Ok(Effect::Same);
        }
        let want = self.model.insert_host(&args());
        let done = agree(got, want, |inserted| HostInserted {
            node: inserted.node,
            duplicate_host_pages: inserted.duplicate_host_pages.clone(),
            inserted_pages: inserted.inserted_pages,
        })?;
        let Some((_, want)) = done else {
            self.host.give(&host_pages)?;
            return Ok(Effect::Same);
        };
        self.host.give(&want.duplicate_host_pages)?;
        Ok(Effect::Changed)
    }

    // ---- the rest ----

    fn hashes(&mut self, pick: u8) -> Outcome {
        let id = self.pick_node(pick);
        let got = self.tree.page_hashes(id);
        agree(got, self.model.page_hashes(id), Vec::clone)?;
        let got = self.tree.prefix_hashes(id);
        agree(got, self.model.prefix_hashes(id), Vec::clone)?;
        Ok(Effect::Same)
    }

    fn reset(&mut self) -> Outcome {
        // Nothing says what becomes of the events before it that nobody took.
        self.compare_events()?;
        self.tree.reset();
        self.model.reset();
        self.device = Pool::new(self.device.next);
        self.host = Pool::new(self.host.next);
        self.wanted.clear();
        self.locks.used.append(&mut self.locks.live);
        self.host_locks.used.append(&mut self.host_locks.live);
        self.pins.used.append(&mut self.pins.live);
        self.plans.used.append(&mut self.plans.live);
        self.backups.used.append(&mut self.backups.live);
        self.loads.used.append(&mut self.loads.live);
        Ok(Effect::Changed)
    }

    /// Every one of these must be refused.
    fn again(&mut self, what: u8, pick: u8) -> Outcome {
        match what {
            0 => {
                if let Some((mut lock, handle)) = self.locks.take_used(pick) {
                    let got = self.tree.dec_lock_ref(&mut lock);
                    both(got, self.model.dec_lock_ref(handle))?;
                }
            }
            1 => {
                if let Some((mut lock, handle)) = self.host_locks.take_used(pick) {
                    let got = self.tree.dec_host_lock_ref(&mut lock);
                    both(got, self.model.dec_host_lock_ref(handle))?;
                }
            }
            2 => {
                if let Some((pin, handle)) = self.pins.take_used(pick) {
                    both(self.tree.unpin(pin), self.model.unpin(handle))?;
                }
            }
            3 => {
                if let Some((mut plan, handle)) = self.plans.take_used(pick) {
                    let pages = vec![u32::MAX; plan.pages()];
                    let got = self.tree.begin_load_back(&mut plan, &pages);
                    both(got, self.model.begin_load_back(handle, &pages))?;
                    let got = self.tree.cancel_load_back_plan(&mut plan);
                    both(got, self.model.cancel_load_back_plan(handle))?;
                }
            }
            // Used-up acks, and live ones of the other kind.
            4..=6 => {
                let from = match what {
                    4 => &self.backups.used,
                    5 => &self.loads.used,
                    _ => &self.loads.live,
                };
                if let Some(index) = index(pick, from.len()) {
                    let (ack, handle) = from[index];
                    let got = self.tree.finish_backup(ack);
                    both(got, self.model.finish_backup(handle))?;
                    let got = self.tree.cancel_backup(ack);
                    both(got, self.model.cancel_backup(handle))?;
                }
            }
            _ => {
                let from = match what {
                    7 => &self.backups.used,
                    _ => &self.backups.live,
                };
                if let Some(index) = index(pick, from.len()) {
                    let (ack, handle) = from[index];
                    let got = self.tree.finish_load_back(ack);
                    both(got, self.model.finish_load_back(handle))?;
                    let got = self.tree.cancel_load_back(ack);
                    both(got, self.model.cancel_load_back(handle))?;
                }
            }
        }
        Ok(Effect::Same)
    }

    /// What another tree gave is refused, and stays good there.
    fn foreign(&mut self, what: u8) -> Outcome {
        let mut other = Tree::new(self.config.tree()).map_err(|error| format!("{error:?}"))?;
        let size = self.config.page_size;
        let key = Key { pages: vec![0, 1], tail: u8::from(self.config.bigram), ..Key::default() };
        let buffer = key.buffer(size);
        let inserted = other.insert(InsertArgs::new(buffer.tokens(), &[0, 1]));
        let node = inserted.map_err(|error| format!("{error:?}"))?.node;
        let still_good = |result: Result<(), rust_tree_core::Error>| {
            result.map_err(|error| format!("no longer good in its own tree: {error:?}"))
        };
        match what {
            0 => {
                let mut lock = other.inc_lock_ref(node).map_err(|error| error.to_string())?;
                let got = self.tree.dec_lock_ref(&mut lock);
                both(got, self.model.dec_lock_ref(NO_HANDLE))?;
                still_good(other.dec_lock_ref(&mut lock))?;
            }
            1 => {
                let lock = other.inc_host_lock_ref(node);
                let mut lock = lock.map_err(|error| error.to_string())?;
                let got = self.tree.dec_host_lock_ref(&mut lock);
                both(got, self.model.dec_host_lock_ref(NO_HANDLE))?;
                still_good(other.dec_host_lock_ref(&mut lock))?;
            }
            2 if self.config.write.is_some() => {
                let pin = other.pin(node, None).map_err(|error| error.to_string())?;
                both(self.tree.unpin(pin), self.model.unpin(NO_HANDLE))?;
                still_good(other.unpin(pin))?;
            }
            3 | 4 => {
                let plan = other.plan_load_back(node);
                let mut plan = plan.map_err(|error| error.to_string())?;
                let got = self.tree.begin_load_back(&mut plan, &[]);
                both(got, self.model.begin_load_back(NO_HANDLE, &[]))?;
                let got = self.tree.cancel_load_back_plan(&mut plan);
                both(got, self.model.cancel_load_back_plan(NO_HANDLE))?;
                if what == 3 {
                    still_good(other.cancel_load_back_plan(&mut plan))?;
                } else {
                    let ack = other.begin_load_back(&mut plan, &[]);
                    let ack = ack.map_err(|error| error.to_string())?;
                    let got = self.tree.finish_load_back(ack);
                    both(got, self.model.finish_load_back(NO_HANDLE))?;
                    let got = self.tree.cancel_load_back(ack);
                    both(got, self.model.cancel_load_back(NO_HANDLE))?;
                    still_good(other.finish_load_back(ack))?;
                }
            }
            5 | 6 if self.config.write.is_some() => {
                let ack = other.begin_backup(&[node], &[0, 1]);
                let ack = ack.map_err(|error| error.to_string())?;
                let got = self.tree.finish_backup(ack);
                both(got, self.model.finish_backup(NO_HANDLE))?;
                let got = self.tree.cancel_backup(ack);
                both(got, self.model.cancel_backup(NO_HANDLE))?;
                still_good(other.finish_backup(ack).map(|_| ()))?;
            }
            _ => {}
        }
        Ok(Effect::Same)
    }

    fn unknown(&mut self, what: u8, pick: u8) -> Outcome {
        let id = self.dead_node(pick);
        match what {
            0 => both(self.tree.inc_lock_ref(id), self.model.inc_lock_ref(id)).map(|_| ())?,
            1 => {
                let got = self.tree.inc_host_lock_ref(id);
                both(got, self.model.inc_host_lock_ref(id)).map(|_| ())?;
            }
            2 => both(self.tree.drop_nodes(&[id]), self.model.drop_nodes(&[id])).map(|_| ())?,
            3 => {
                let got = self.tree.begin_backup(&[id], &[]);
                both(got, self.model.begin_backup(&[id], &[])).map(|_| ())?;
            }
            4 => both(self.tree.plan_load_back(id), self.model.plan_load_back(id)).map(|_| ())?,
            5 => both(self.tree.pin(id, None), self.model.pin(id, None)).map(|_| ())?,
            6 => both(self.tree.node_info(id), self.model.info(id)).map(|_| ())?,
            7 => both(self.tree.page_hashes(id), self.model.page_hashes(id)).map(|_| ())?,
            8 => both(self.tree.prefix_hashes(id), self.model.prefix_hashes(id)).map(|_| ())?,
            9 => {
                let args = || InsertHostArgs {
                    anchor: id,
                    tokens: Tokens::U32(&[]),
                    host_pages: &[],
                    hashes: None,
                    namespace: NAMESPACES[0],
                };
                let want = self.model.insert_host(&args());
                both(self.tree.insert_host(args()), want).map(|_| ())?;
            }
            _ => both(self.tree.pending_acks(id), self.model.pending_acks(id)).map(|_| ())?,
        }
        Ok(Effect::Same)
    }
}
