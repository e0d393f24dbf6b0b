"""What `unified-cache demo` does: a model, a workload, a server in several set-ups, a figure."""
