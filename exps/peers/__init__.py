"""The contestants of the benchmarks: the same model, trained for one step, by pippy and by others."""
