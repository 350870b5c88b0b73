"""Has the names of `vllm.v1.metrics.reader` that exist here: what `LLM.get_metrics` returns."""

from jaxkv.build.vllm_arguments import ABSENT_METRICS, refuse_names
from jaxkv.engine.metrics import Counter, Gauge, Histogram, Metric, prometheus_text

__all__ = ["Counter", "Gauge", "Histogram", "Metric", "prometheus_text"]

__getattr__ = refuse_names(__name__, ABSENT_METRICS)
