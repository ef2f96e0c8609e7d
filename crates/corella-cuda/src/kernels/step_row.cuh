// The data of a row in the step's arrays.
#pragma once
#include "prelude.cuh"

struct Row {
    // Negative for the slot's draw in an earlier step.
    i32 token;
    // -1 for rows that pad the step.
    i32 position;
    u32 slot;
    u32 span;
};
