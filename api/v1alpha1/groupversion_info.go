// Package v1alpha1 is version v1alpha1 of the API group sales.flashsale.dev.
// +kubebuilder:object:generate=true
// +groupName=sales.flashsale.dev
package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// GroupVersion is the group and version of the types here.
var GroupVersion = schema.GroupVersion{Group: "sales.flashsale.dev", Version: "v1alpha1"}

// AddToScheme adds the types to a scheme.
func AddToScheme(s *runtime.Scheme) error {
	s.AddKnownTypes(GroupVersion, &FlashSale{}, &FlashSaleList{})
	metav1.AddToGroupVersion(s, GroupVersion)
	return nil
}
