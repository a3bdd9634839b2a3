"""What worker and daemon agree on: generated stubs, shared-memory layout, records, names, locks."""
