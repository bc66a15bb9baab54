"""AOT compilation for chips not attached: static resource usage, bytes, roofline bounds."""
