// What the step's arrays say about a row.
#pragma once
#include "prelude.cuh"

struct Row {
    // Negative if the token is the one that an earlier step drew for the slot.
    i32 token;
    // -1 for rows that fill up the step.
    i32 position;
    u32 slot;
    u32 span;
};
