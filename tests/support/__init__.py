"""What tests share: servers, toy engines, checkpoints, recorded logs, and naive models to compare with."""
