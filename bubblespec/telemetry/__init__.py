"""What a run says of itself: metrics, timelines, traces. Reads records, decides nothing."""
