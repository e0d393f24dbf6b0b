//! The header of a stored object, which makes damage and mix-ups visible: `storage/page_format.py` says what is where.

/// Bytes of a header.
pub const HEADER_BYTES: usize = 192;

/// Bytes at its front that its checksum covers. The checksum comes right after them.
pub const COVERED: usize = 184;

/// Bytes of the longest key.
pub const MOST_KEY_BYTES: usize = 150;

const CODEC_AT: usize = 9;
const KEY_AT: usize = 32;

/// Magic, version 2, bytes of the header, the kind of the checksum (XXH3).
const FRONT: [u8; CODEC_AT] = *b"UCPG\x02\x00\xC0\x00\x01";

const _: () = assert!(FRONT[6] as usize == HEADER_BYTES && KEY_AT + MOST_KEY_BYTES <= COVERED);

/// What a header says of its object.
#[derive(Clone, Copy, Debug)]
pub struct Header<'a> {
    /// At most [`MOST_KEY_BYTES`] bytes.
    pub key: &'a [u8],
    /// Bytes of the body as it is stored.
    pub stored: u64,
    /// Bytes of the page.
    pub page: u64,
    /// Of the body.
    pub codec: u8,
}

impl Header<'_> {
    /// The bytes that the checksum covers.
    fn covered(&self) -> [u8; COVERED] {
        let mut bytes = [0; COVERED];
        bytes[..CODEC_AT].copy_from_slice(&FRONT);
        bytes[CODEC_AT] = self.codec;
        bytes[16..24].copy_from_slice(&self.stored.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.page.to_le_bytes());
        bytes[KEY_AT..][..self.key.len()].copy_from_slice(self.key);
        bytes
    }

    /// The header, with zeros where the checksum goes.
    pub fn bytes(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[..COVERED].copy_from_slice(&self.covered());
        bytes
    }

    /// The codec of a header, if that would be written like this now but for the codec (ours is not looked at), and its
    /// checksum is this one.
    pub fn codec_of(&self, found: &[u8; HEADER_BYTES], checksum: u64) -> Option<u8> {
        let codec = found[CODEC_AT];
        let same = found[..COVERED] == Header { codec, ..*self }.covered();
        (same && found[COVERED..] == checksum.to_le_bytes()).then_some(codec)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEADER: Header<'_> = Header { key: b"ab-cd", stored: 0x0102_0304, page: 0x0506_0708, codec: 3 };

    #[test]
    fn what_is_written_is_found_again_and_nothing_else() {
        let mut bytes = HEADER.bytes();
        assert_eq!(bytes[..10], *b"UCPG\x02\x00\xC0\x00\x01\x03");
        bytes[COVERED..].copy_from_slice(&7u64.to_le_bytes());
        assert_eq!(HEADER.codec_of(&bytes, 7), Some(3));
        assert_eq!(HEADER.codec_of(&bytes, 8), None);
        for other in [
            Header { key: b"ab-ce", ..HEADER },
            Header { key: b"ab-cde", ..HEADER },
            Header { key: b"ab-c", ..HEADER },
            Header { stored: 1, ..HEADER },
            Header { page: 1, ..HEADER },
        ] {
            assert_eq!(other.codec_of(&bytes, 7), None, "{other:?}");
        }
        for bit in 0..8 * HEADER_BYTES {
            bytes[bit / 8] ^= 1 << (bit % 8);
            // A codec is whatever is there: whoever asks says which ones are known.
            assert_eq!(HEADER.codec_of(&bytes, 7).is_some(), bit / 8 == CODEC_AT, "bit {bit}");
            bytes[bit / 8] ^= 1 << (bit % 8);
        }
    }
}
