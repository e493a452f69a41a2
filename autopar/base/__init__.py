"""The ground: plain data, errors, units, options and the cluster; nothing of JAX."""
