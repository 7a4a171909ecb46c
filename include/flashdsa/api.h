#pragma once

/// Marks what the shared library exports.
#define FLASHDSA_API __attribute__((visibility("default")))
