package inventory

import (
	"context"
	"database/sql"
	"encoding/binary"
	"fmt"
	"time"

	"github.com/google/uuid"
)

// idAt makes the i-th id of those made at an instant of the database's clock: a UUID of version 7 whose 12 bits after the
// millisecond go on with the time (RFC 9562, section 6.2, method 3), plus i, so that the ids of a transaction ascend; 62 bits
// are random, from crypto/rand. Nobody can guess one, and the reservations made since an instant are a range of the primary key.
func idAt(now time.Time, i int) uuid.UUID {
	u := uuid.New() // of version 4: the last 62 bits, and the variant, stay
	ticks := now.UnixMicro()*4096/1000 + int64(i)
	binary.BigEndian.PutUint64(u[:8], uint64(ticks)>>12<<16|0x7000|uint64(ticks)&0xfff)
	return u
}

// FirstID is lower than the id of any reservation made at the instant or after.
func FirstID(at time.Time) uuid.UUID {
	var u uuid.UUID
	binary.BigEndian.PutUint64(u[:8], uint64(at.UnixMilli())<<16)
	return u
}

// BuyersLimit is how many rows BuyersAfter reads at most.
const BuyersLimit = 10_000

// BuyersAfter calls each with the reservations whose ids are above after, in ascending order, and their buyers, BuyersLimit at
// most. It gives how many there were, and how many reservations of the sale were ever made as of the same instant; that is
// zero when there were none.
func (s *Store) BuyersAfter(ctx context.Context, sale, after uuid.UUID, each func(reservation uuid.UUID, buyer string)) (n int, granted int64, err error) {
	// One statement has one read view: the count is of the instant of the rows.
	err = s.queries("buyers").each(ctx, func(rows *sql.Rows) error {
		var rid, buyer []byte
		if err := rows.Scan(&rid, &buyer, &granted); err != nil {
			return err
		}
		n++
		each(uuid.UUID(rid), string(buyer))
		return nil
	}, `SELECT reservation_id, buyer, (SELECT COALESCE(SUM(granted), 0) FROM flashsale_tally WHERE sale_id = ?) FROM flashsale_reservation FORCE INDEX (PRIMARY)
		WHERE sale_id = ? AND reservation_id > ? ORDER BY reservation_id LIMIT ?`, id(sale), id(sale), id(after), BuyersLimit)
	if err != nil {
		return 0, 0, fmt.Errorf("reading the newest buyers: %w", err)
	}
	return n, granted, nil
}
