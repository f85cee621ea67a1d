"""The scheduler's side: requests wait for their features, prefill reads them in place."""
