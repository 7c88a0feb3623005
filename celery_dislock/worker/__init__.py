"""What a worker does beside its tasks: start-up, shutdown, sweeping and strange arrivals."""
