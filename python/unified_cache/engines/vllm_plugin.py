"""How vLLM finds the connector: it calls `register` in each of its processes (``vllm.general_plugins``)."""

__all__ = ["CONNECTOR", "register"]

CONNECTOR = "UnifiedCacheConnector"


def register() -> None:
    """Make ``kv_connector="UnifiedCacheConnector"`` known to vLLM. More than once is fine."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if CONNECTOR not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR, "unified_cache.engines.vllm", CONNECTOR)
