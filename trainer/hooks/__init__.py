"""What happens around the loop, one file a hook. The four that correctness rests on: SetEpoch, SeedProcesses, GatherMetrics, SaveOnMain."""
