"""The inference engines, each behind the protocol of `engines.base`."""
