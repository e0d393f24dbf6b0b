"""The third tier: pages that outlive the process."""
