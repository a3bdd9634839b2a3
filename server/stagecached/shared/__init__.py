"""Node-shared blocks: full blocks of rows, kept under the hash of their content, for every session of a namespace.

Layers look down only:

    calls        the gRPC calls, numbers checked          manager    all namespaces: join, drop, adopt, budget
    transfer     rows from a session's pool               manifest   what a restarted daemon must know of a namespace
    membership   one session in one namespace: the seam that a consumer uses
    store        one namespace: publish, read, evict      leases     who holds which blocks
    rebuild      the store again, from sealed headers     segment    the shared memory;  layout   its bytes

The pure structures below (pool, queue, map, leases, hashes, namespace digest) are ``stagecached.index``.
"""
