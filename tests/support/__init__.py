"""What the live and the distributed tests share: models, trainers, servers that misbehave, and launchers."""
