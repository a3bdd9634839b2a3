"""The bench: what a step and a hit cost, beside no cache at all and beside vLLM-Omni's in-process manager.

batch.py makes the steps, contenders.py and peer.py what is driven, measure.py drives and times, workloads.py, hits.py,
copies.py and sessions.py say what is driven, figures.py and report.py what comes of it. ``run.run_bench`` does it all.
"""
