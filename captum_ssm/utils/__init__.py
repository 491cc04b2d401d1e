"""What knows nothing of mixers: copies, memory, threads, nested values; one small file each."""
