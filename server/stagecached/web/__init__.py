"""The daemon's HTTP side: /metrics for Prometheus, /healthz for probes, and a page to look at.

http    a small HTTP/1.1 server for GET, on the daemon's event loop
site    what is served where
state   figures as JSON, for the page and for `stagecache top`
static  the page: plain files, no build step, nothing from elsewhere
"""
