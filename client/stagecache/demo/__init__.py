"""``stagecache demo``: the whole product on one machine, with a real engine, a real daemon and a tiny real model."""
