// The data of a row in the step's arrays.
#pragma once
#include "prelude.cuh"

struct Row {
    // The token; negative for the slot's draw in an earlier step.
    i32 token;
    // The position; -1 for rows that pad the step.
    i32 position;
    u32 slot;
    u32 span;
};
