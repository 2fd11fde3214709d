"""The ledger on disk: tables, checks, copies, generations."""
