//! Reads variables of a compiled module: a cubin is an ELF file.

/// The value of an initialised variable of four bytes.
pub fn variable(cubin: &[u8], name: &str) -> Option<u32> {
    let num_sections = u16_at(cubin, 0x3c)? as usize;
    let section_size = u16_at(cubin, 0x3a)? as usize;
    let sections = usize_at(cubin, 0x28)?;
    let section = |index: usize| {
        (index < num_sections).then(|| cubin.get(sections + index * section_size..))?
    };
    const SYMBOL_TABLE: u32 = 2;
    const SYMBOL_BYTES: usize = 24;
    for index in 0..num_sections {
        let table = section(index)?;
        if u32_at(table, 4)? != SYMBOL_TABLE {
            continue;
        }
        let symbols = cubin
            .get(usize_at(table, 0x18)?..)?
            .get(..usize_at(table, 0x20)?)?;
        let names = cubin.get(usize_at(section(u32_at(table, 0x28)? as usize)?, 0x18)?..)?;
        for symbol in symbols.chunks_exact(SYMBOL_BYTES) {
            let found = names.get(u32_at(symbol, 0)? as usize..)?;
            if found.starts_with(name.as_bytes()) && found.get(name.len()) == Some(&0) {
                let home = section(u16_at(symbol, 6)? as usize)?;
                return u32_at(
                    cubin,
                    usize_at(home, 0x18)?.checked_add(usize_at(symbol, 8)?)?,
                );
            }
        }
    }
    None
}

fn bytes<const N: usize>(data: &[u8], at: usize) -> Option<[u8; N]> {
    data.get(at..at.checked_add(N)?)?.try_into().ok()
}

fn u16_at(data: &[u8], at: usize) -> Option<u16> {
    bytes(data, at).map(u16::from_le_bytes)
}

fn u32_at(data: &[u8], at: usize) -> Option<u32> {
    bytes(data, at).map(u32::from_le_bytes)
}

fn usize_at(data: &[u8], at: usize) -> Option<usize> {
    usize::try_from(bytes(data, at).map(u64::from_le_bytes)?).ok()
}
