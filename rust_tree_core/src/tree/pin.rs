//! Pins keep one copy of a prefix, on whichever tier.

use super::node::Slot;
use super::{Origin, Tree};
use crate::NodeId;
use crate::error::{Result, bad_argument, bad_lock};

/// A pin on the path of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Pin {
    origin: Origin,
    serial: u64,
    node: NodeId,
}

impl Pin {
    /// The node that was pinned.
    pub fn node(&self) -> NodeId {
        self.node
    }
}

#[derive(Debug)]
pub(super) struct PinState {
    node: NodeId,
    /// On the clock of the caller, in its unit.
    expires_at: Option<f64>,
}

impl Tree {
    /// Keeps one copy of the path of a node: it may be demoted (written back first if need be), not deleted.
    ///
    /// Refused if tokens under a pin would be more than the capacity, or if there is no host tier to demote to.
    pub fn pin(&mut self, node: NodeId, expires_at: Option<f64>) -> Result<Pin> {
        self.need_host("pin")?;
        let slot = self.slot(node)?;
        if expires_at.is_some_and(f64::is_nan) {
            return Err(bad_argument!("expires_at is not a number"));
        }
        let new: u64 = self
            .ancestors(slot)
            .map(|slot| &self.nodes[slot as usize])
            .filter(|node| node.pins == 0)
            .map(|node| u64::from(node.len))
            .sum();
        let tokens = self.in_tokens(self.sizes.pinned + new);
        if let Some(capacity) = self.pin_capacity
            && tokens > capacity
        {
            return Err(bad_argument!(
                "pin on node {node} would make {tokens} pinned tokens, pin_capacity is {capacity}"
            ));
        }
        self.sizes.pinned += new;
        let serial = self.serial();
        let path: Vec<Slot> = self.ancestors(slot).collect();
        for slot in path {
            self.edit(slot, |node| node.pins += 1);
            self.refresh(slot);
        }
        self.pins.insert(serial, PinState { node, expires_at });
        Ok(Pin { origin: self.origin, serial, node })
    }

    /// Ends a pin. One that has ended before, by itself or not, is an error.
    pub fn unpin(&mut self, pin: Pin) -> Result<()> {
        self.check_origin(pin.origin, &format!("pin on node {}", pin.node))?;
        let state = self
            .pins
            .remove(&pin.serial)
            .ok_or_else(|| bad_lock!("pin on node {} has ended before", pin.node))?;
        self.end_pin(state.node);
        Ok(())
    }

    /// Ends every pin whose time has come, and says how many.
    pub fn expire_pins(&mut self, now: f64) -> usize {
        let expired: Vec<u64> = self
            .pins
            .iter()
            .filter(|(_, pin)| pin.expires_at.is_some_and(|at| at <= now))
            .map(|(&serial, _)| serial)
            .collect();
        for serial in &expired {
            if let Some(state) = self.pins.remove(serial) {
                self.end_pin(state.node);
            }
        }
        expired.len()
    }

    fn end_pin(&mut self, node: NodeId) {
        let path: Vec<Slot> = self.ancestors(self.slots[&node]).collect();
        for slot in path {
            self.edit(slot, |node| node.pins -= 1);
            if self.nodes[slot as usize].pins == 0 {
                self.sizes.pinned -= u64::from(self.nodes[slot as usize].len);
            }
            self.refresh(slot);
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::tree::testing::{keys, tree, tree_with};
    use crate::{Error, TreeConfig, WritePolicy};

    #[test]
    fn a_pinned_node_is_written_back_rather_than_deleted() {
        let mut tree = tree(1, Some(WritePolicy::WriteThrough));
        let node = tree.put(&keys(0..4), 0).node;
        let pin = tree.pin(node, Some(5.0)).unwrap();
        assert_eq!(tree.evict(4, Some(0)).device_pages.len(), 0); // no room, so it stays
        assert_eq!(tree.evict(4, None).write_back_nodes, [node]);
        tree.backed_up(&[node], 0);
        assert_eq!((tree.device_tokens(), tree.host_tokens()), (0, 4));
        assert!(tree.evict_host(4).host_pages.is_empty());
        assert_eq!((tree.expire_pins(4.9), tree.expire_pins(5.0), tree.pinned_tokens()), (0, 1, 0));
        assert!(matches!(tree.unpin(pin), Err(Error::Lock(_))));
        assert_eq!(tree.evict_host(4).host_pages.len(), 4);
        tree.sound();
    }

    #[test]
    fn pins_are_capped_by_the_tokens_they_cover_together() {
        let config = TreeConfig { pin_capacity: Some(6), ..TreeConfig::default() };
        let mut tree = tree_with(config);
        let a = tree.put(&keys(0..4), 0).node;
        let b = tree.put(&keys(0..8), 0).node;
        let first = tree.pin(a, None).unwrap();
        tree.pin(a, None).unwrap(); // covered already
        let before = tree.digest();
        assert!(
            matches!(tree.pin(b, None), Err(Error::Argument(text)) if text.contains("pin_capacity is 6"))
        );
        assert_eq!((tree.digest(), tree.pinned_tokens()), (before, 4));
        tree.unpin(first).unwrap();
        assert_eq!(tree.pinned_tokens(), 4);
        tree.sound();
    }

    #[test]
    fn a_pin_needs_a_tier_to_go_to() {
        let mut tree = tree(1, None);
        let node = tree.put(&keys(0..4), 0).node;
        assert!(matches!(tree.pin(node, None), Err(Error::Argument(text)) if text.contains("write_policy")));
    }
}
