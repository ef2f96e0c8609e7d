// Atomic operations on integers, which many thread blocks combine in any order. Each returns the earlier value.
#pragma once
#include "prelude.cuh"

#ifndef EMULATED_DEVICE

DEVICE u64 atomic_add(u64* counter, u64 addend) { return atomicAdd(counter, addend); }

// Replaces a number by `other`, if `other` is larger.
DEVICE u32 atomic_max(u32* number, u32 other) { return atomicMax(number, other); }
DEVICE u64 atomic_max(u64* number, u64 other) { return atomicMax(number, other); }

#else

// The emulated device runs one thread at a time, without interruption here.
DEVICE u64 atomic_add(u64* counter, u64 addend) {
    const u64 before = *counter;
    *counter = before + addend;
    return before;
}

template <class T>
DEVICE T atomic_max(T* number, T other) {
    const T before = *number;
    *number = max(before, other);
    return before;
}

#endif
