"""The unit tier: pure logic with tiny tensors and throw-away local servers; no engine, no GPU, no network."""
