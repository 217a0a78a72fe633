/* SPDX-License-Identifier: GPL-2.0-only */
/* Macro that declares a map. */
#ifndef BRAID_MAP_H
#define BRAID_MAP_H

#include <bpf/bpf_helpers.h>

#define MAP(NAME, TYPE, KEY, VALUE, ENTRIES, FLAGS)   \
	struct {                                      \
		__uint(type, TYPE);                   \
		__type(key, KEY);                     \
		__type(value, VALUE);                 \
		__uint(max_entries, ENTRIES);         \
		__uint(map_flags, FLAGS);             \
	} NAME SEC(".maps")

#endif
