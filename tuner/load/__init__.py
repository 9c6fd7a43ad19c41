"""The load a trial puts on a server: what is asked (workload), when (arrivals), how it is timed (client)."""
