"""What is under way between the tiers: queues, acks, and the state that the tick moves on."""
