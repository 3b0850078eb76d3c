"""What runs Turnback: containers, clusters, dashboards, and a real pair of engines on one machine."""
