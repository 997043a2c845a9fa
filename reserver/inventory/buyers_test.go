package inventory_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/google/uuid"

	"flashsale.dev/operator/reserver/inventory"
	"flashsale.dev/operator/test/testmysql"
)

// Ids carry the database's time, so the newest buyers are a range of the key; the count of reservations is of the same instant.
func TestBuyersAfter(t *testing.T) {
	store := testmysql.Store(t)
	sale := testmysql.Sale(10).In(t, store)
	read := func(after uuid.UUID) (ids []uuid.UUID, buyers []string, granted int64) {
		n, granted, err := store.BuyersAfter(t.Context(), sale.ID, after, func(id uuid.UUID, buyer string) {
			ids, buyers = append(ids, id), append(buyers, buyer)
		})
		if err != nil || n != len(ids) {
			t.Fatalf("%d rows, error %v", n, err)
		}
		return ids, buyers, granted
	}
	if _, buyers, granted := read(uuid.Nil); len(buyers) != 0 || granted != 0 {
		t.Errorf("before the first: %v, %d", buyers, granted)
	}
	line := inventory.NewLine("line")
	var between time.Time
	for i := range 2 {
		requests := make([]inventory.Request, 3)
		for k := range requests {
			requests[k] = inventory.Request{Buyer: fmt.Sprintf("buyer-%d-%d", i, k), Quantity: 1}
		}
		results, err := store.Claim(t.Context(), sale.ID, line, requests)
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range results {
			if id := r.Reservation.ID; id.Version() != 7 || id.Variant() != uuid.RFC4122 || id.String() < inventory.FirstID(r.Reservation.GrantedAt).String() {
				t.Errorf("id %s of %s, variant %s", id, r.Reservation.GrantedAt, id.Variant())
			}
		}
		for now := between; i == 0 && !now.After(results[0].Reservation.GrantedAt.Add(2*time.Millisecond)); between = now {
			if now, err = store.Now(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
	}
	ids, buyers, granted := read(uuid.Nil)
	if fmt.Sprint(buyers) != "[buyer-0-0 buyer-0-1 buyer-0-2 buyer-1-0 buyer-1-1 buyer-1-2]" || granted != 6 {
		t.Errorf("%v of %d", buyers, granted)
	}
	if _, late, _ := read(inventory.FirstID(between)); fmt.Sprint(late) != "[buyer-1-0 buyer-1-1 buyer-1-2]" {
		t.Errorf("since %v: %v", between, late)
	}
	if _, late, granted := read(ids[4]); fmt.Sprint(late) != "[buyer-1-2]" || granted != 6 {
		t.Errorf("after the fifth: %v of %d", late, granted)
	}
	snap, err := store.Snapshot(t.Context(), sale.ID)
	if err != nil || snap.Granted != 6 {
		t.Errorf("the snapshot counts %d, %v", snap.Granted, err)
	}
}
