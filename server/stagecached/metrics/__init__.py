"""What the daemon tells an operator: figures folded from shared memory when somebody asks, and at no other time.

    record_figures   the consumer's words, written a record at a time
    catalog          every metric: name, kind, labels and what it means
    fold             words of a session as named figures
    totals           what sessions that ended leave behind, and which replica a session is
    calls, pulse     RPC seconds; event-loop lag, garbage-collection pauses
    survey           presence counts and maps of pools, bounded in time
    journal          the last errors, each with its cure
    history          a point a second, for pages that show time
    families, text   the figures as Prometheus families, and these as text

Nothing here takes a lock on the way of a step.
"""
