"""Where pages lie: the pools of the device and the host tier, and who owns which page."""
