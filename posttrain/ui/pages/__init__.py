"""One module per page, each with `page(place)`, called inside its Blocks."""
