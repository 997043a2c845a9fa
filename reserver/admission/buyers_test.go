package admission

import (
	"fmt"
	"log/slog"
	"testing"

	"github.com/google/uuid"

	"flashsale.dev/operator/reserver/inventory"
	"flashsale.dev/operator/test/testmysql"
)

func TestBuyersForgetNobody(t *testing.T) {
	b := newBuyers()
	for i := range 100_000 {
		b.Add(fmt.Sprint("buyer-", i))
	}
	inVain := 0
	for i := range 100_000 {
		if !b.MayHave(fmt.Sprint("buyer-", i)) {
			t.Fatalf("buyer-%d was forgotten", i)
		}
		if b.MayHave(fmt.Sprint("other-", i)) {
			inVain++
		}
	}
	if inVain > 100 {
		t.Errorf("%d of 100,000 others are taken for buyers", inVain)
	}
}

// A reservation whose transaction commits after younger ones have been read is missed at first, and then memory does not
// know all buyers, until it has found that one.
func TestBuyersOfALateCommitAreNotMissed(t *testing.T) {
	store := testmysql.Store(t)
	sale := testmysql.Sale(2).In(t, store)
	w := NewWatch(store, sale.ID, slog.New(slog.DiscardHandler), func(*View) {})
	look := func() *View {
		t.Helper()
		v, err := w.look(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
	claim := func(buyer string) uuid.UUID {
		t.Helper()
		results, err := store.Claim(t.Context(), sale.ID, inventory.NewLine(buyer), []inventory.Request{{Buyer: buyer, Quantity: 1}})
		if err != nil || results[0].Reservation == nil {
			t.Fatalf("%v, %v", results, err)
		}
		return results[0].Reservation.ID
	}
	first := claim("ann")
	claim("bob")
	// As if ann's transaction had not committed yet: her row is there, but below what was read, and not seen.
	w.Buyers.settled, w.Buyers.below = first, 0
	if v := look(); v.AllBuyers || !w.Buyers.MayHave("bob") || w.Buyers.MayHave("ann") {
		t.Errorf("all buyers known %t, bob %t, ann %t", v.AllBuyers, w.Buyers.MayHave("bob"), w.Buyers.MayHave("ann"))
	}
	testmysql.Eventually(t, "all buyers are known", func() bool { return look().AllBuyers })
	if !w.Buyers.MayHave("ann") || w.Buyers.MayHave("cat") {
		t.Errorf("ann %t, cat %t", w.Buyers.MayHave("ann"), w.Buyers.MayHave("cat"))
	}
	// Once known, the buyers are not read again while nothing is granted.
	w.Buyers.settled = uuid.Max
	if !look().AllBuyers {
		t.Error("the buyers were read again")
	}
}
