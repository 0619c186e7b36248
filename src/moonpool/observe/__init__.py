"""What a node tells about itself: metrics, statistics, health."""
